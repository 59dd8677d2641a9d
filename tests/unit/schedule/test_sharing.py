"""Hosts' models that would be wrong on shared rows are refused; rows that cannot share pass on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megapack.errors import ConfigError, ScheduleError
from megapack.hosts import megatron_core
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.host_rows import SharedRows
from megapack.prefixes import find_host_row
from megapack.schedule import sharing
from megapack.schedule.reading import read_row_shapes
from megapack.schedule.sharing import Sharing, why_not_shared

pytestmark = pytest.mark.unit

SIZES = {
    "get_tensor_model_parallel_world_size": 1,
    "get_tensor_model_parallel_rank": 0,
    "get_context_parallel_world_size": 1,
    "get_context_parallel_rank": 0,
    "get_expert_model_parallel_world_size": 1,
    "get_pipeline_model_parallel_world_size": 1,
}
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 0, 0]])


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch)
    sharing.log_once.cache_clear()


def set_sizes(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    for name, size in {**SIZES, **changes}.items():
        monkeypatch.setattr(parallel_state, name, lambda size=size: size)


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "kv_channels": 8,
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,
        "mtp_num_layers": None,
    }
    return SimpleNamespace(**{**values, **changes})


class Chunk(torch.nn.Module):
    """A host's model of one stage."""

    pre_process = post_process = True
    position_embedding_type = "learned_absolute"

    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = torch.nn.Identity()
        self.core_attention = PackedSDPA(config(), 1, AttnMaskType.causal, "self")
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(
        self, input_ids: Any, position_ids: Any = None, packed_seq_params: Any = None
    ) -> Any:
        return self.decoder(input_ids)


class Router(torch.nn.Module):
    """A router of Megatron, with what hosts set on it."""

    routing_type = "aux_loss"

    def __init__(self, jitter: float | None = None, **attributes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_input_jitter_eps=jitter)
        vars(self).update(attributes)


def make(chunk: Chunk | None = None, is_training: bool = True, **changes: Any) -> Sharing:
    return Sharing([chunk or Chunk()], config(**changes), is_training=is_training)


def call(**changes: Any) -> dict[str, Any]:
    ends = torch.tensor([0, 4, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=4, max_seqlen_kv=4)
    return {"input_ids": IDS, "position_ids": None, "packed_seq_params": params, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1 with shared prefixes"),
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refusal:
        make(**changes).check()
    assert "share_prefixes=False" in str(refusal.value)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Router(router_replay=object()), "router_replay has one entry per token"),
        (Router(routing_replay=object()), "routing_replay has one entry per token"),
        (Router(jitter=0.1), "moe_input_jitter_eps"),
    ],
)
def test_modules_that_would_be_wrong_are_refused(module: torch.nn.Module, text: str) -> None:
    with pytest.raises(ConfigError, match=f"part: {text}"):
        make(Chunk(part=module)).check()


def test_dropout_that_drops_nothing_is_fine() -> None:
    chunk = Chunk(part=torch.nn.Dropout(0.1))
    with pytest.raises(ConfigError, match=r"part \(dropout of 0.1\) with shared prefixes"):
        make(chunk, is_training=False).check()
    make(chunk.eval(), is_training=False, hidden_dropout=0.1).check()


def test_attention_across_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="core_attention is Identity"):
        make(Chunk(core_attention=torch.nn.Identity())).check()


def test_hidden_states_that_the_forward_step_captures_are_refused() -> None:
    chunk = Chunk(embedding=torch.nn.Identity())
    chunk.decoder.register_forward_hook(lambda module, args, output: None)
    made = make(chunk)
    captured: list[Any] = []

    def capture(module: Any, args: Any, output: Any) -> None:
        captured.append(output)

    def forward_step(iterator: Any, model: Any) -> Any:
        handle = model.embedding.register_forward_hook(capture)
        try:
            return model(**next(iterator))
        finally:
            handle.remove()

    def read(step: Any) -> Any:
        return read_row_shapes(step, iter([call()]), [chunk], 1, sequence_shards=1, sharing=made)

    # What was hooked before, such as by a profiler, sees the shorter row and may.
    assert read(lambda iterator, model: model(**next(iterator)))[0] == [(10, 1)]
    made._slices.clear()
    with pytest.raises(ConfigError, match=r"captures the output of embedding \(.*capture\)"):
        read(forward_step)


def test_equal_rows_of_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, get_expert_model_parallel_world_size=2)
    make().check()
    with pytest.raises(ConfigError, match="'allgather' needs equal rows"):
        make(moe_token_dispatcher_type="allgather").check()


UNEQUAL = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packed_seq_params": None}, "without packed_seq_params"),
        ({"input_ids": IDS.view(2, 5)}, "input_ids are not"),
        ({"decoder_input": torch.zeros(10, 1, 4)}, "also given decoder_input"),
        ({"padding_mask": torch.zeros(1, 10, dtype=torch.bool)}, "also given padding_mask"),
        ({"extra_block_kwargs": {"images": torch.zeros(3)}}, "also given extra_block_kwargs"),
        ({"position_ids": torch.zeros(3, 1, 10)}, "position_ids do not begin at 0"),
        ({"position_ids": UNEQUAL}, "position_ids do not begin at 0"),
    ],
)
def test_rows_that_cannot_share_pass_on_with_one_line(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    with caplog.at_level(logging.INFO, logger="megapack.schedule.sharing"):
        for _ in range(2):
            made.note(call(**changes))
    assert made.spans == [None, None]
    (message,) = caplog.messages
    assert reason in message
    assert made.agree([made.spans], None) == [None, None]


def test_samples_that_context_parallel_ranks_do_not_cut_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_sizes(monkeypatch, get_context_parallel_world_size=2)
    made = make(context_parallel_size=2)
    made.note(call(input_ids=IDS[:, :5]))
    assert made.spans == [None]


def test_only_the_first_tensor_parallel_rank_gives_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, get_tensor_model_parallel_rank=1)
    made = make()
    made.note(call())
    assert made.spans is None


def test_calls_whose_stages_cannot_be_told_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_shared([Chunk()], config(), "exchange") == ""
    assert "has no decoder" in why_not_shared([torch.nn.Identity()], config(), "read")
    set_sizes(monkeypatch, get_pipeline_model_parallel_world_size=2)
    assert why_not_shared([Chunk()], config(), "read") == ""
    assert "lengths='exchange'" in why_not_shared([Chunk()], config(), "exchange")
    assert "one length" in why_not_shared([Chunk()], config(variable_seq_lengths=False), "read")


@pytest.fixture
def shared_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Chunk, SharedRows]]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    chunk = Chunk()
    rows = SharedRows([chunk], make(chunk).layout)
    with rows.hooked(is_training=True):
        rows.begin(find_host_row(IDS[0].numpy(), [4, 4, 2], make().layout), 3)
        yield chunk, rows


def test_a_second_call_of_the_model_is_refused(shared_rows: tuple[Chunk, SharedRows]) -> None:
    chunk, _ = shared_rows
    chunk.post_process = False
    chunk.decoder = torch.nn.Identity()
    chunk(IDS)
    with pytest.raises(ScheduleError, match="calls the model twice for micro-batch 3"):
        chunk(IDS)


def test_another_row_than_was_read_is_refused(shared_rows: tuple[Chunk, SharedRows]) -> None:
    chunk, _ = shared_rows
    with pytest.raises(ScheduleError, match="has 9 tokens on this GPU, and had 10"):
        chunk(IDS[:, 1:])


@pytest.mark.parametrize(("value", "shares"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_on(
    value: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAPACK_SHARE_PREFIXES", value)
    assert megatron_core.ScheduleOptions().share_prefixes is shares


def test_another_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPACK_SHARE_PREFIXES", "yes")
    with pytest.raises(ConfigError, match="MEGAPACK_SHARE_PREFIXES='yes'; set 1"):
        megatron_core.ScheduleOptions()
