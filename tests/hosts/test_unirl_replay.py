"""Packed rows of UniRL's replay, on a tiny model of transformers."""

from __future__ import annotations

import warnings
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack import ConfigError, patching
from megapack.hosts import unirl
from megapack.hosts.unirl import rows as unirl_rows
from megapack.hosts.unirl.rows import (
    PackedRow,
    attention_arguments,
    pack_row,
    row_logprobs,
)

pytestmark = pytest.mark.hosts

VOCAB_SIZE = 50
# Prompt and response of each sample: one without a response, one without a prompt, one with neither
# a prompt nor a second token.
SIZES = [(3, 2), (2, 0), (0, 3), (1, 4), (0, 1)]


def make_micro_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `pack_row`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB_SIZE, (len(SIZES), 4), generator=generator)
    mask = (torch.arange(4) < torch.tensor([prompt for prompt, _ in SIZES])[:, None]).long()
    lengths = torch.tensor([response for _, response in SIZES])
    tokens = torch.randint(1, VOCAB_SIZE, (int(lengths.sum()),), generator=generator)
    return ids * mask, mask, tokens, lengths


def test_prompts_may_be_padded_on_either_side() -> None:
    ids, mask, tokens, lengths = make_micro_batch()
    right = pack_row(ids, mask, tokens, lengths)
    counts = mask.sum(-1).tolist()
    left_ids = torch.stack([row.roll(4 - n) for row, n in zip(ids, counts, strict=True)])
    left = pack_row(left_ids, mask.flip(-1), tokens, lengths)
    assert left.ids.equal(right.ids)
    assert left.predict_index.equal(right.predict_index)


@pytest.fixture(scope="module")
def model() -> Any:
    """A Qwen3 whose layers run again in the backward."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen3ForCausalLM(config).double()
    with warnings.catch_warnings():
        # transformers 5 renames it, older versions know this name alone.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def packed_logprobs(model: Any, row: PackedRow, temperature: float = 0.7) -> Tensor:
    return row_logprobs(
        model,
        input_ids=row.ids,
        position_ids=row.position_ids,
        predict_index=row.predict_index,
        targets=row.targets,
        temperature=temperature,
        autocast_dtype=None,
        **attention_arguments(model, row),
    )


def single_logprobs(model: Any, micro_batch: tuple[Tensor, ...]) -> Tensor:
    """One unpadded sample at a time, by the model's own forward."""
    ids, mask, tokens, lengths = micro_batch
    found = []
    for prompt, real, response in zip(ids, mask, tokens.split(lengths.tolist()), strict=True):
        whole = torch.cat([prompt[real.bool()], response])
        if len(whole) < 2 or not len(response):
            continue
        logits = model(input_ids=whole[None], use_cache=False).logits[0, :-1].float() / 0.7
        every = logits.log_softmax(-1).gather(-1, whole[1:, None])[:, 0]
        found.append(every[-len(response) :])
    return torch.cat(found)


@pytest.mark.parametrize("chunk_rows", [3, 2048])
def test_log_probs_and_gradients_are_those_of_one_sample_at_a_time(
    model: Any, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unirl_rows, "_CHUNK_ROWS", chunk_rows)
    micro_batch = make_micro_batch()
    weights = torch.linspace(-1, 1, 8)
    gradients = []
    values = []
    for logprobs in (
        packed_logprobs(model, pack_row(*micro_batch)),
        single_logprobs(model, micro_batch),
    ):
        assert logprobs.dtype == torch.float32
        model.zero_grad()
        (logprobs * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        values.append(logprobs.detach())
    assert torch.allclose(*values, atol=1e-6)
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()


def test_a_token_that_nothing_precedes_keeps_the_rollouts_log_prob(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage's replay, through the model's call as UniRL makes it."""
    monkeypatch.setattr(patching, "original", lambda name: lambda *args, **kw: name)
    monkeypatch.setattr(model, "forward", MethodType(unirl.replay_forward, model))
    ids, mask, tokens, lengths = micro_batch = make_micro_batch()
    conditions = SimpleNamespace(prompt=SimpleNamespace(input_ids=ids, attention_mask=mask))
    rollout = torch.linspace(-9, -8, len(tokens))
    segment = SimpleNamespace(tokens=tokens, lengths=lengths, log_probs=rollout)
    stage = SimpleNamespace(
        model=SimpleNamespace(transformer=model),
        packed_replay=True,
        autocast_dtype=torch.bfloat16,
        logprob_dtype=torch.float32,
    )
    found = unirl.replay(stage, conditions, segment=segment, temperature=0.7)
    found.sum().backward()
    monkeypatch.undo()
    row = pack_row(*micro_batch)
    assert found[~row.predicted].tolist() == rollout[~row.predicted].tolist()
    assert torch.allclose(found[row.predicted], single_logprobs(model, micro_batch), atol=1e-6)


@pytest.mark.parametrize("change", [{"packed_replay": False}, {"tokens": None}, {"none": True}])
def test_other_replays_are_unirls_own(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "original", lambda name: lambda *args, **kw: name)
    ids, mask, tokens, lengths = make_micro_batch()
    if "none" in change:
        tokens, lengths = tokens[:0], torch.zeros_like(lengths)
    conditions = SimpleNamespace(prompt=SimpleNamespace(input_ids=ids, attention_mask=mask))
    segment = SimpleNamespace(tokens=change.get("tokens", tokens), lengths=lengths, log_probs=None)
    transformer = torch.nn.Linear(1, 1)
    stage = SimpleNamespace(
        packed_replay=change.get("packed_replay", True),
        model=SimpleNamespace(transformer=transformer),
    )
    own = "unirl.models.qwen3.ar.Qwen3ARStage.replay"
    assert unirl.replay(stage, conditions, segment=segment) == own


def test_padded_calls_of_sdpa_are_as_before(model: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    unirl_rows._attend_within_samples()
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    unirl_rows._attend_within_samples()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    ids, mask, *_ = make_micro_batch()
    mask[[2, 4], 0] = 1
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        alone = model(input_ids=ids[:1, :3], use_cache=False).logits
    assert torch.allclose(padded[0, :3], alone[0], atol=1e-9)


def test_flash_attention_is_told_the_samples() -> None:
    row = pack_row(*make_micro_batch())
    config = SimpleNamespace(_attn_implementation="flash_attention_2", layer_types=None)
    arguments = attention_arguments(SimpleNamespace(config=config), row)
    assert arguments["cu_seq_lens_q"].tolist() == [0, 4, 6, 10]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_k"] == 4


@pytest.mark.parametrize(
    ("attention", "layers", "says"),
    [
        ("eager", ["full_attention"], "attention 'eager'"),
        ("sdpa", ["full_attention", "linear_attention"], "linear_attention"),
    ],
)
def test_what_would_cross_samples_is_refused(attention: str, layers: list[str], says: str) -> None:
    row = pack_row(*make_micro_batch())
    config = SimpleNamespace(_attn_implementation=attention, layer_types=layers)
    with pytest.raises(ConfigError, match=says):
        attention_arguments(SimpleNamespace(config=config), row)
