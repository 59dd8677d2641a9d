"""What a step of UniRL under a token budget asks of its losses, anchors and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from megapack.errors import ConfigError


def mean_over(algorithm: Any) -> Literal["samples", "tokens"]:
    """What a micro-batch's loss is the mean of.

    Raises:
        ConfigError: neither.
    """
    name = type(algorithm).__name__
    mode = str(getattr(algorithm, "loss_agg_mode", None))
    if mode == "token-mean":
        return "tokens"
    if name == "DRPO" and mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"loss_agg_mode={mode!r}: DRPO does not know it and takes the mean over tokens; set "
            "token-mean or seq-mean-token-sum-norm"
        )
    if mode.startswith("seq-mean"):
        return "samples"
    raise ConfigError(
        f"loss_agg_mode={mode!r} of {name} is no mean over sequences or tokens, so its gradient "
        "would change with the micro-batches; set token-mean or a seq-mean mode, or "
        "micro_token_budget=null"
    )


def replayed_anchors(algorithm: Any, segment: Any) -> tuple[str, ...]:
    """Fields of the segment that the algorithm's `prepare_segment` replays."""
    if algorithm.recomputes_anchor():
        return tuple(algorithm.anchor_fields)
    # DRPO replays the whole track at once and declares no field.
    replays = getattr(algorithm, "old_logp_source", None) == "replay"
    return ("log_probs",) if replays and segment.log_probs is not None else ()


def with_response(micro: Any) -> tuple[Any, bool]:
    """The micro-batch; one without any response token with a token of no advantage, and True.

    UniRL skips forward and backward of micro-batches without tokens, and the other ranks would wait
    in FSDP's collectives. With an advantage of 0 the loss and its gradient are exactly 0.
    """
    segment = micro.segment
    if segment.tokens is None or len(segment.tokens):
        return micro, False
    num_empty = int(micro.batch_size) - 1

    def one_value(packed: Any) -> Any:
        return None if packed is None else [packed.new_zeros(1), *[packed[:0]] * num_empty]

    packed = {name: one_value(getattr(segment, name)) for name in ("tokens", "log_probs")}
    filled = type(segment).pack(**packed, loss_mask=one_value(segment.loss_mask))
    advantages = (
        micro.advantages if micro.advantages is None else torch.zeros_like(micro.advantages)
    )
    return dataclasses.replace(micro, segment=filled, advantages=advantages), True
