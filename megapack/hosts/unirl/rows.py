"""UniRL's replay of an AR model on one packed row, without padding and never across samples.

    prompts [n, width] + responses [R] -> one row [1, T] -> hidden states at the positions that
    predict a response token [P, hidden] -> fp32 log-probs, a chunk of the vocabulary's logits at a
    time

A row leaves out samples without a response, and the last token of each sample, which predicts
nothing. Prompts of 2 and 3 tokens with responses of 2 and 1:

    row        p p r | q q q
    position   0 1 2 | 0 1 2
    predicts     1 2       1       predict_index = [1, 2, 5]
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapack.errors import ConfigError

logger = logging.getLogger(__name__)

# Rows of logits at a time: at a vocabulary of 151,936 their fp32 values take 1.2 GB.
_CHUNK_ROWS = 2048

# The argument that tells `_sdpa_within_samples` the lengths of a row's samples.
_LENGTHS = "packed_row_lengths"


@dataclass(frozen=True)
class PackedRow:
    """A micro-batch's samples one after the other."""

    ids: Tensor
    """Token ids [1, T]."""
    position_ids: Tensor
    """Positions [1, T], from 0 in each sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample in the row."""
    predict_index: Tensor
    """Places in the row whose hidden states predict a response token [P]."""
    targets: Tensor
    """The predicted tokens [P]."""
    predicted: Tensor
    """Which response tokens of the micro-batch these are [R], bool: all but first tokens of samples
    without a prompt, which nothing precedes."""


def pack_row(prompt_ids: Tensor, prompt_mask: Tensor, tokens: Tensor, lengths: Tensor) -> PackedRow:
    """Lay out one row.

    Args:
        prompt_ids, prompt_mask: padded prompts and which tokens are real [n, width].
        tokens: response tokens of all samples, one after the other [R].
        lengths: response tokens of each sample [n].
    """
    real = prompt_mask.bool()
    prompt_lengths: list[int] = real.sum(-1).tolist()
    response_lengths: list[int] = lengths.tolist()
    prompts = torch.split(prompt_ids[real], prompt_lengths)
    responses = torch.split(tokens, response_lengths)
    ids, positions, places, predicted = [], [], [], []
    row_lengths: list[int] = []
    start = 0
    for prompt, response in zip(prompts, responses, strict=True):
        if not len(response):
            continue
        length = len(prompt) + len(response) - 1
        first = max(len(prompt) - 1, 0)
        ids += [prompt, response[:-1]]
        positions.append(torch.arange(length))
        places.append(torch.arange(start + first, start + length))
        predicted.append(torch.arange(len(response)) >= int(not len(prompt)))
        row_lengths.append(length)
        start += length
    device = tokens.device
    mask = _joined(predicted, torch.bool).to(device)
    return PackedRow(
        ids=_joined(ids, tokens.dtype).to(device)[None],
        position_ids=_joined(positions).to(device)[None],
        lengths=tuple(length for length in row_lengths if length),
        predict_index=_joined(places).to(device),
        targets=tokens[mask],
        predicted=mask,
    )


def _joined(parts: Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype)


def attention_arguments(model: Any, row: PackedRow) -> dict[str, Any]:
    """Arguments of a transformers model that keep attention within the row's samples.

    With flash attention they are transformers' own. With "sdpa", transformers would compute the
    scores of all pairs of the row and mask those across samples; the function that this registers
    attends to each sample by itself.

    Raises:
        ConfigError: layers or an attention that this cannot keep within samples.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"layers are {sorted(kinds)}: packed rows are for full attention; set "
            "packed_replay=false and micro_cost_model=dense"
        )
    name = str(config._attn_implementation)
    # A dict of masks is taken as it is. With None, transformers would make a mask [T, T].
    arguments: dict[str, Any] = {"attention_mask": {"full_attention": None}}
    if name.startswith("flash_attention"):
        ends = torch.tensor([0, *accumulate(row.lengths)], dtype=torch.int32, device=row.ids.device)
        longest = max(row.lengths)
        return {
            **arguments,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    if name != "sdpa":
        raise ConfigError(
            f"attention {name!r}: packed rows need sdpa or flash_attention_2; set it, or "
            "packed_replay=false and micro_cost_model=dense"
        )
    _attend_within_samples()
    return {**arguments, _LENGTHS: row.lengths}


def _attend_within_samples() -> None:
    """Replace transformers' "sdpa" by one that knows packed rows and passes other calls on.

    It is replaced for good: layers that are checkpointed run again in the backward, with the
    arguments that they had.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(own, "takes_packed_rows", False):
        return

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        """Query, key and value are [1, heads, T, channels]; returns [1, T, heads, channels]."""
        lengths = kw.pop(_LENGTHS, None)
        if lengths is None:
            return own(module, query, key, value, mask, **kw)
        ends = pairwise(accumulate(lengths, initial=0))
        parts = [
            own(module, *(part[:, :, start:end] for part in (query, key, value)), None, **kw)[0]
            for start, end in ends
        ]
        return torch.cat(parts, dim=1), None

    attend.takes_packed_rows = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend


def row_logprobs(
    model: Any,
    *,
    predict_index: Tensor,
    targets: Tensor,
    temperature: float,
    autocast_dtype: torch.dtype | None,
    **arguments: Any,
) -> Tensor:
    """The fp32 log-probs [P] of a row's targets, inside the model's forward.

    Args:
        model: a causal LM of transformers, with `model` and `lm_head`.
        predict_index, targets: as those of `PackedRow`.
        temperature: logits are divided by it; 0 and less count as 1.
        autocast_dtype: of the decoder on CUDA; None: no autocast. Logits are outside of it.
    """
    half = autocast_dtype in (torch.float16, torch.bfloat16)
    with torch.autocast("cuda", autocast_dtype) if half else nullcontext():
        output = model.model(**arguments, use_cache=False, return_dict=True)
    hidden = output.last_hidden_state[0, predict_index]
    scale = temperature if temperature > 0 else 1.0

    def logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        logits: Tensor = model.lm_head(hidden).float() / scale
        chosen = logits.gather(-1, targets[:, None])[:, 0]
        return chosen - logits.logsumexp(-1)

    parts: list[Tensor] = []
    for start in range(0, len(targets), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        # A chunk's logits are computed again in the backward, so that only one chunk is held.
        parts.append(checkpoint(logprobs, hidden[chunk], targets[chunk], use_reentrant=False))
    return torch.cat(parts)
