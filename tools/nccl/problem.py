"""The problem of the several ranks: the GPU tests' model, twice as deep, and its cases.

Every layout of 2, 4 or 8 ranks is a case: `cases(4)` gives those that 4 ranks can run. What a case
is about is a feature of its plan: rows over several DP ranks, pieces, split backwards, own orders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from megapack import Layout, Plan, Policy, SharedPrefixes, build_dp_schedule
from megapack.job.config.sections import ModelConfig
from megapack.samples import SampleBatch
from tests.gpu import problem
from tests.hand_made_orders import with_weights_later
from tools.nccl.layouts import layout_name

Dtype = Literal["fp32", "bf16"]

NUM_LAYERS = 8
"""A layer per chunk of pp4 x vpp2."""
_ROW_TOKENS = problem.BUDGET


class Feature(NamedTuple):
    """What is special about a case's plans."""

    plan: Callable[[Layout], Plan]
    has_families: bool = False
    """Whether its samples are answers to common prompts."""
    has_experts: bool = False
    splits_backward: bool = False
    must_hold: str = ""
    """The figure of a case without which it would not be about the feature."""
    overlaps: bool = False
    """A distributed optimizer, gradients and weights that travel while layers run, and a second
    forward with the updated weights."""


def _planned(layout: Layout, **policy: Any) -> Plan:
    lengths = problem.make_batch().lengths
    return build_dp_schedule(
        lengths, layout=layout, max_tokens_per_gpu=_ROW_TOKENS // layout.cp, policy=Policy(**policy)
    )


def _wide(layout: Layout) -> Plan:
    """Rows of half the tokens, so that the longest samples lie over several ranks."""
    lengths = problem.make_batch().lengths
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=_ROW_TOKENS // 2,
        policy=Policy(context_parallel="dynamic"),
    )


def _of_families(layout: Layout, row_tokens: int, *, shares: bool, **policy: Any) -> Plan:
    batch = problem.make_family_batch()
    prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(batch))])
    return build_dp_schedule(
        batch.lengths,
        layout=layout,
        max_tokens_per_gpu=row_tokens,
        prefixes=prefixes if shares else None,
        policy=Policy(**policy),
    )


FEATURES: dict[str, Feature] = {
    "": Feature(_planned),
    "experts": Feature(_planned, has_experts=True),
    "wide": Feature(_wide, must_hold="rows_over_ranks"),
    "pieces": Feature(
        lambda layout: _of_families(
            layout, problem.PIECE_BUDGET, shares=True, split_samples="auto"
        ),
        has_families=True,
        must_hold="pieces",
    ),
    "split_backward": Feature(
        lambda layout: with_weights_later(_planned(layout), 1), splits_backward=True
    ),
    "own_orders": Feature(
        lambda layout: _of_families(
            layout, _ROW_TOKENS // 2, shares=False, split_samples="auto", backward="split"
        ),
        has_families=True,
        splits_backward=True,
        must_hold="own_orders",
    ),
    "overlap": Feature(_planned, overlaps=True, must_hold="moved_logprobs"),
}


class Case(NamedTuple):
    """A layout with a feature, in a precision, with an attention."""

    layout: Layout
    feature: str
    dtype: Dtype
    attention: str

    @property
    def name(self) -> str:
        parts = [layout_name(self.layout), self.feature, self.dtype, self.attention]
        return " ".join(filter(None, parts))

    @property
    def settings(self) -> ModelConfig:
        """Its model."""
        return model(self.attention, self.dtype, has_experts=FEATURES[self.feature].has_experts)

    @property
    def samples(self) -> str:
        """The name of its reference."""
        feature = FEATURES[self.feature]
        return "families" if feature.has_families else "experts" if feature.has_experts else "plain"

    def batch(self) -> SampleBatch:
        """Its samples."""
        return make_batch(self.samples)


REFERENCES: tuple[tuple[str, Dtype], ...] = (
    *(("plain", "fp32"), ("plain", "bf16"), ("families", "fp32"), ("families", "bf16")),
    ("experts", "fp32"),
)
"""Samples and precision of each reference."""

# In the order of what they tell: sizes besides dp, which takes the other ranks, and the feature.
_LAYOUTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"pp": 2, "vpp": 2}, ""),
    ({}, "wide"),
    ({"pp": 2}, "pieces"),
    ({"tp": 2, "sequence_parallel": True, "pp": 2}, ""),
    ({"cp": 2}, ""),
    ({"ep": 2}, "experts"),
    ({}, "overlap"),
    ({"pp": 2}, "own_orders"),
    ({"pp": 4, "vpp": 2}, ""),
    ({"pp": 2, "vpp": 2}, "split_backward"),
    ({"pp": 2, "vpp": 2}, "overlap"),
    ({"pp": 2}, "wide"),
    ({"pp": 2, "vpp": 2, "ep": 2}, "experts"),
    ({"cp": 2, "pp": 2}, ""),
    ({"pp": 2}, ""),
    ({"pp": 4}, ""),
    ({"tp": 2, "sequence_parallel": True}, ""),
)
_BOTH_KERNELS = 5
"""So many of them run in bf16 with each attention there is."""
_LEAST_DP = {"wide": 2, "overlap": 2}


def cases(ranks: int) -> Iterator[Case]:
    """The cases of so many ranks that this machine's packages can run, the most telling first."""
    packages = {"te": "transformer_engine", "varlen": "torch.nn.attention.varlen"}
    fast = [name for name, package in packages.items() if find_spec(package) is not None]
    precise = "te" if "te" in fast else "sdpa"
    for number, (sizes, feature) in enumerate(_LAYOUTS):
        model_ranks = math.prod(sizes.get(name, 1) for name in ("tp", "pp", "cp"))
        least_dp = _LEAST_DP.get(feature, sizes.get("ep", 1))
        if ranks % model_ranks or ranks // model_ranks < least_dp:
            continue
        layout = Layout(dp=ranks // model_ranks, **sizes)
        # Transformer Engine has no attention in fp32 over several ranks.
        slices = layout.cp > 1 or feature in ("wide", "pieces", "own_orders")
        yield Case(layout, feature, "fp32", "sdpa" if slices else precise)
        if FEATURES[feature].has_experts:
            continue  # a rounding error may choose another expert
        # Both kernels in the most telling layouts, then in turn.
        own = fast if number < _BOTH_KERNELS else fast[number % 2 :][:1] or fast
        yield from (Case(layout, feature, "bf16", attention) for attention in own)


def model(attention: str, dtype: Dtype, *, has_experts: bool = False) -> ModelConfig:
    """The model, with experts or without."""
    made = problem.moe_model(attention) if has_experts else problem.model(attention, dtype)
    return dataclasses.replace(made, num_layers=NUM_LAYERS, dtype=dtype)


def make_batch(samples: str) -> SampleBatch:
    """The samples of a reference."""
    return problem.make_family_batch() if samples == "families" else problem.make_batch()
