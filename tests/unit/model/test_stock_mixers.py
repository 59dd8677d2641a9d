"""Megatron's own GatedDeltaNet and MambaMixer in packed rows: what they read, what is refused.

The layers run in a child process, with torch in place of their kernels (`tests.stock_mixers`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megapack.errors import ConfigError
from megapack.model.attention.mixers import (
    describing_samples,
    refuse_unpacked_mixers,
    sample_indices,
    stock_mixers,
)
from megapack.model.attention.packed import packed_seq_params
from megapack.model.recurrent import driven
from megapack.schedule.row_rules import Feature, check_rows
from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

HAS_INDICES = "seq_idx" in {field.name for field in dataclasses.fields(PackedSeqParams)}
"""Before Megatron-Core 0.17, MambaMixer makes the indices itself, from `cu_seqlens`."""

CHILD = """
import contextlib
import json
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megapack import launch
from megapack.errors import ConfigError
from megapack.job.gpt import initialize_parallel
from megapack.layout import Layout
from megapack.model.attention.mixers import describing_samples
from megapack.model.attention.packed import packed_seq_params, refuse_unpacked_attention
from tests import stock_mixers

launch.start("cpu")
initialize_parallel(Layout(), 1)
stock_mixers.install()
groups = ProcessGroupCollection.use_mpu_process_groups()
config = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, add_bias_linear=False,
    activation_func=torch.nn.functional.silu, normalization="RMSNorm",
    mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=8, linear_conv_kernel_dim=4,
)
lengths = [7, 1, 12, 2]
torch.manual_seed(1)
hidden_T1H = torch.randn(sum(lengths), 1, 32)

def described(lengths, **changes):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    params = packed_seq_params(ends, max(lengths), sum(lengths))
    for name, value in changes.items():
        assert hasattr(params, name)
        setattr(params, name, value)
    return params

def run(layer, hidden_T1H, params):
    mask = [None] if type(layer).__name__ == "GatedDeltaNet" else []
    return layer(hidden_T1H, *mask, packed_seq_params=params)[0]

def outcome(layer, parts):
    layer.zero_grad()
    outputs = torch.cat([run(layer, hidden, params) for hidden, params in parts])
    outputs.square().sum().backward()
    return outputs.detach(), torch.cat([p.grad.flatten() for p in layer.parameters()])

def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())

found = {}
layers = {"MambaMixer": stock_mixers.mamba, "GatedDeltaNet": stock_mixers.gated_delta_net}
for kind, build in layers.items():
    layer = build(config, groups)
    for name, weight in layer.named_parameters():
        # Mild decays, so that a state that goes on into the next sample shows.
        torch.nn.init.uniform_(weight, -0.3, 0.3)
    wrapper = torch.nn.Sequential(layer)
    try:
        refuse_unpacked_attention(wrapper)
        found[kind] = {"refused": ""}
    except ConfigError as caught:
        found[kind] = {"refused": str(caught)}
        continue
    spans = [(h, described([len(h)])) for h in hidden_T1H.split(lengths)]
    try:
        alone = outcome(layer, spans)
    except NotImplementedError as caught:
        found[kind] = {"refused": str(caught)}
        continue
    rows = {"row": described(lengths)}
    if hasattr(rows["row"], "seq_idx"):
        rows["without"] = described(lengths, seq_idx=None)
        rows["hooked"] = described(lengths, seq_idx=None)
    for name, params in rows.items():
        with describing_samples() if name == "hooked" else contextlib.nullcontext():
            both = outcome(layer, [(hidden_T1H, params)])
        found[kind][name] = [error(ours, theirs) for ours, theirs in zip(both, alone)]
launch.stop()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """Relative errors of outputs and gradients of a row against each of its samples alone."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Megatron's mamba_mixer imports Triton")
    return run_code(CHILD)


def test_a_row_of_mamba_is_its_samples(layers: dict[str, Any]) -> None:
    assert layers["MambaMixer"]["refused"] == ""
    outputs, gradients = layers["MambaMixer"]["row"]
    assert outputs < 1e-6
    assert gradients < 1e-6


@pytest.mark.skipif(not HAS_INDICES, reason="Megatron-Core before 0.17 makes the indices itself")
def test_without_indices_the_state_of_mamba_goes_on(layers: dict[str, Any]) -> None:
    outputs, gradients = layers["MambaMixer"]["without"]
    assert outputs > 0.1
    assert gradients > 0.01


@pytest.mark.skipif(not HAS_INDICES, reason="Megatron-Core before 0.17 makes the indices itself")
def test_a_framework_s_step_is_given_the_indices(layers: dict[str, Any]) -> None:
    assert layers["MambaMixer"]["hooked"] == layers["MambaMixer"]["row"]


def test_a_row_of_gated_delta_nets_is_its_samples(layers: dict[str, Any]) -> None:
    if not has_packed_delta_net():
        assert "not support packed sequence" in layers["GatedDeltaNet"]["refused"]
        pytest.skip("GatedDeltaNet takes packed rows since Megatron-Core 0.18")
    assert layers["GatedDeltaNet"]["refused"] == ""
    outputs, gradients = layers["GatedDeltaNet"]["row"]
    assert outputs < 1e-6
    assert gradients < 1e-6


def has_packed_delta_net() -> bool:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return hasattr(GatedDeltaNet, "_resolve_cu_seqlens")


# ---- The row's description.

ENDS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)


@pytest.mark.skipif(not HAS_INDICES, reason="PackedSeqParams has seq_idx since Megatron-Core 0.17")
@pytest.mark.parametrize("cp", [1, 2])
def test_indices_are_those_that_megatron_makes(cp: int) -> None:
    params = packed_seq_params(ENDS, 5, 9, cp=cp)
    theirs = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS, total_tokens=9)
    assert torch.equal(params.seq_idx, theirs.seq_idx)
    assert params.seq_idx.dtype == theirs.seq_idx.dtype
    assert params.seq_idx.is_contiguous()
    # Megatron would make them anew in each copy.
    assert params.total_tokens is None
    later = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS, total_tokens=12)
    assert torch.equal(sample_indices(ENDS, 12), later.seq_idx)


# ---- Refusals.


class MambaMixer(torch.nn.Module):
    """As Megatron's, as far as checks go."""

    __module__ = "megatron.core.ssm.mamba_mixer"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2))
        self.config = config(**settings)
        self.cp = SimpleNamespace(cp_size=self.config.context_parallel_size)

    def forward(self, hidden_states: Any, *, packed_seq_params: Any = None) -> Any:
        return hidden_states


class GatedDeltaNet(torch.nn.Module):
    """As Megatron's, as far as checks go."""

    __module__ = "megatron.core.ssm.gated_delta_net.gdn"

    def __init__(self, *, added: bool = True, **settings: Any) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2))
        self.config = config(**settings)
        self.out_norm = torch.nn.RMSNorm(8)
        self.out_norm.weight.sequence_parallel = added  # type: ignore[attr-defined]


def unknown(name: str, module: str = __name__) -> torch.nn.Module:
    """A mixer of Megatron-Core 0.20, or a framework's own."""
    members = {"__module__": module, "A_log": torch.zeros(2)}
    made: torch.nn.Module = type(name, (torch.nn.Module,), members)()
    return made


class HostMixer(MambaMixer):
    """A framework's, which computes what Megatron's does."""

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return {prefix: self.config}


class OtherMixer(MambaMixer):
    """A framework's, with a forward of its own."""

    def forward(self, hidden_states: Any, *, packed_seq_params: Any = None) -> Any:
        return -hidden_states


class Qwen3NextGatedDeltaNet(torch.nn.Module):
    """As slime's, as far as checks go."""

    __module__ = "slime_plugins.models.qwen3_next"
    A_log = torch.zeros(2)

    def forward(self, hidden_states: Any, cu_seqlens: Any = None) -> Any:
        return hidden_states


Qwen3NextGatedDeltaNet.forward.__module__ = Qwen3NextGatedDeltaNet.__module__


class WithDecays(torch.nn.Module):
    """A layer whose name tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2))


class OurMixer(MambaMixer):
    """As those of `model.recurrent`."""

    runs_packed_rows = True


def config(**settings: Any) -> Any:
    defaults = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**defaults | settings)


def chunk(mixer: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"mixer": mixer})


@pytest.mark.parametrize(
    "mixer",
    [
        MambaMixer(),
        MambaMixer(tensor_model_parallel_size=2),
        GatedDeltaNet(),
        GatedDeltaNet(context_parallel_size=2),
        GatedDeltaNet(tensor_model_parallel_size=2, sequence_parallel=True),
        OurMixer(),
        HostMixer(),
        Qwen3NextGatedDeltaNet(),
    ],
)
def test_plain_rows_run_on_mixers_that_are_right(mixer: torch.nn.Module) -> None:
    refuse_unpacked_mixers(chunk(mixer))


SPLIT: Any = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (GatedDeltaNet(**SPLIT), ["out_norm", "tp=2", "set sequence_parallel=True"]),
        (GatedDeltaNet(added=False, sequence_parallel=True, **SPLIT), ["out_norm", "tp=2"]),
        (
            unknown("GatedDeltaNet2", "megatron.core.ssm.gated_delta_net.gdn2"),
            ["GatedDeltaNet2", "not known", "runs_packed_rows"],
        ),
        (unknown("GatedDeltaProductMixer", "megatron.core.ssm.gated_delta_product"), ["not known"]),
        (unknown("KimiDeltaAttention"), ["KimiDeltaAttention", "not known"]),
        (OtherMixer(), ["OtherMixer", "not known"]),
        (WithDecays(), ["WithDecays", "not known"]),
    ],
)
def test_others_are_refused_by_name(mixer: torch.nn.Module, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unpacked_mixers(chunk(mixer))
    for word in ["mixer is ", *words, "PackedGatedDeltaNet or PackedMambaMixer"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("has_te", [False, True])
def test_mamba_on_several_ranks_needs_transformer_engine(
    has_te: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.ssm import mamba_context_parallel

    monkeypatch.setattr(mamba_context_parallel, "tex", object() if has_te else None)
    made = chunk(MambaMixer(context_parallel_size=2))
    if has_te:
        refuse_unpacked_mixers(made)
    else:
        with pytest.raises(ConfigError, match=r"cp=2 ranks .* Transformer Engine; .* set cp=1"):
            refuse_unpacked_mixers(made)


def check(mixer: torch.nn.Module, *features: Feature) -> None:
    settings = config(
        mtp_num_layers=None, attention_dropout=0.0, hidden_dropout=0.0, cp_comm_type=None
    )
    check_rows([without_positions(mixer)], settings, features, is_training=True)


@pytest.mark.parametrize("mixer", [OurMixer(), MambaMixer(), GatedDeltaNet(), HostMixer()])
def test_ours_and_megatrons_run_every_row(mixer: torch.nn.Module) -> None:
    check(mixer, "prefixes", "wide", "pieces")


def changed(made: torch.nn.Module, **attributes: Any) -> torch.nn.Module:
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("feature", ["prefixes", "wide", "pieces"])
@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (OtherMixer(), "not known to begin with a state"),
        (WithDecays(), "not known to begin with a state"),
        (changed(MambaMixer(), forward=print), "not known to begin with a state"),
        (changed(MambaMixer(), rmsnorm=False), "its rmsnorm=False is not supported"),
        (changed(GatedDeltaNet(), activation="gelu"), "its activation='gelu' is not"),
        (changed(Qwen3NextGatedDeltaNet(), gdn_backend="flashqla"), "set the backend fla"),
    ],
)
def test_others_run_plain_rows_only(mixer: torch.nn.Module, words: str, feature: Feature) -> None:
    with pytest.raises(ConfigError) as caught:
        check(mixer, feature)
    assert f"{type(mixer).__name__} with " in str(caught.value)
    assert words in str(caught.value)
    assert "PackedGatedDeltaNet or PackedMambaMixer" in str(caught.value)


@pytest.mark.parametrize("kind", [HostMixer, Qwen3NextGatedDeltaNet])
def test_the_next_rows_are_checked_while_layers_are_driven(
    kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "prepare_stock", lambda chunks: None)
    mixer = kind()
    made = without_positions(mixer)
    with driven.driving([made]):
        check(mixer, "prefixes")
        refuse_unpacked_mixers(made)
    assert "forward" not in vars(mixer) | vars(made)
    check(mixer, "prefixes")


def test_layers_inside_of_one_that_is_told_the_row_need_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="exchange between cp ranks loses gradients of states"):
        check(Qwen3NextGatedDeltaNet(), "prefixes")


def test_layers_around_flas_kernels_run_shared_prefixes_alone() -> None:
    mixer = Qwen3NextGatedDeltaNet()
    check(mixer, "prefixes")
    for feature in ("wide", "pieces"):
        with pytest.raises(ConfigError, match="given states inside of a row only"):
            check(mixer, feature)


def without_positions(mixer: torch.nn.Module) -> torch.nn.Module:
    made = chunk(mixer)
    made.position_embedding_type = "none"  # type: ignore[assignment]
    return made


# ---- Rows of another framework.


@pytest.fixture
def as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the class of this file be Megatron's."""
    module = SimpleNamespace(MambaMixer=MambaMixer)
    monkeypatch.setitem(sys.modules, "megatron.core.ssm.mamba_mixer", module)


@pytest.mark.skipif(not HAS_INDICES, reason="PackedSeqParams has seq_idx since Megatron-Core 0.17")
@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
    ],
)
def test_indices_are_of_the_whole_row(
    ranks: dict[str, Any], caplog: pytest.LogCaptureFixture, as_megatrons: None
) -> None:
    mixer = MambaMixer(**ranks)
    shards = ranks.get("context_parallel_size", 1) * (
        ranks["tensor_model_parallel_size"] if "sequence_parallel" in ranks else 1
    )
    padded = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS, cu_seqlens_q_padded=padded)
    hidden = torch.zeros(12 // shards, 1, 2)
    with caplog.at_level(logging.WARNING), describing_samples():
        mixer(hidden, packed_seq_params=params)
        first = params.seq_idx
        mixer(hidden, packed_seq_params=params)
    assert first.tolist() == [[0] * 4 + [1] * 2 + [2] * 6]
    assert params.seq_idx is first
    other = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS)
    mixer(hidden, packed_seq_params=other)
    assert other.seq_idx is None


@pytest.mark.skipif(not HAS_INDICES, reason="PackedSeqParams has seq_idx since Megatron-Core 0.17")
def test_a_warning_says_so_once(caplog: pytest.LogCaptureFixture, as_megatrons: None) -> None:
    class OneMixer(MambaMixer):
        """Named, so that no other test has warned of it."""

    mixer = OneMixer()
    hidden = torch.zeros(9, 1, 2)
    with caplog.at_level(logging.WARNING), describing_samples():
        for _ in range(2):
            mixer(hidden, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS))
    lines = [record.message for record in caplog.records if "seq_idx" in record.message]
    assert len(lines) == 1
    assert "OneMixer without seq_idx" in lines[0]


def test_rows_that_say_it_and_our_mixers_are_left_alone(as_megatrons: None) -> None:
    mixer = OurMixer()
    assert not list(stock_mixers(chunk(mixer)))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ENDS)
    with describing_samples():
        mixer(torch.zeros(9, 1, 2), packed_seq_params=params)
        mixer(torch.zeros(9, 1, 2))
    assert getattr(params, "seq_idx", None) is None
