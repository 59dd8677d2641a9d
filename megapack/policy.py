"""`Policy`: what the planner may do to reach a legal plan, and how much it searches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

from megapack.errors import ConfigError, brief
from megapack.layout import CountRule, Layout

Unreachable = Literal["pad", "drop", "error"]
Oversize = Literal["alone", "error"]
RowShape = Literal["planned", "uniform"]
Balance = Literal["time"]
StepSplit = Literal["contiguous", "balanced"]
GroupSize = Literal["fixed"]
SharePrefixes = Literal["auto", "off"]
ContextParallel = Literal["fixed", "dynamic"]
SplitSamples = Literal["off", "auto"]
Backward = Literal["joint", "split"]
ImagePlace = Literal["ahead", "row"]
AdapterRows = Literal["group", "one"]

# Compiled code multiplies these numbers by sizes of the layout (at most 2**20) in int64:
# 2**40 * 2**20 = 2**60, and int64 ends at 2**63.
_MAX_INT = 2**40


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The planning options: what the planner may do to reach a legal plan and to shorten its steps.

        policy = Policy(split_samples="auto", backward="split")
        plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=16384, policy=policy)

    Raises:
        ConfigError: an unknown choice or a number out of range.
    """

    count_rule: CountRule = "legal"
    """Allowed numbers of micro-batches per rank (M). legal: all that Megatron runs. multiple:
    multiples of G only. per_rank: an old name of legal."""
    unreachable: Unreachable = "pad"
    """Where splitting rows reaches no allowed M: add padding micro-batches, drop trailing rollouts
    of the step, or raise an error."""
    oversize: Oversize = "alone"
    """A sample over the budget: alone in its row, or an error."""
    row_shape: RowShape = "planned"
    """planned: each row is as long as its samples. uniform: all rows of a step are equally long."""
    round_row_tokens: int | None = None
    """Round row tokens up to a multiple of this, within the budget (for batch-invariant
    kernels)."""
    row_shapes: int | None = None
    """The most row lengths (for CUDA graphs): equal parts of the budget, to which rows are padded.
    No sample may exceed the budget then."""
    balance: Balance = "time"
    """time: balance the cost model's seconds over ranks and rows."""
    step_split: StepSplit = "contiguous"
    """Rollouts go to steps in input order, or so that tokens per step are balanced."""
    search: int = 2048
    """Simulations that a step's search may spend; 0 = none. A count, so that all ranks find the
    same plan. Dynamic rows and several adapters may double it; pieces and split backwards
    may take four times as many."""
    group_size: GroupSize = "fixed"
    """fixed: G is the layout's `microbatch_group_size`."""
    max_live_tokens_per_gpu: int | None = None
    """Row tokens per GPU whose activations a stage may hold at once; null = no cap."""
    share_prefixes: SharePrefixes = "auto"
    """auto: a row holds a prefix that samples have in common once, where that pays. The planner
    must be given the prefixes."""
    context_parallel: ContextParallel = "fixed"
    """dynamic: a row may lie over 2, 4 or more consecutive DP ranks, where that is faster or a
    sample is over the budget. Needs planned rows."""
    max_width: int | None = None
    """The most DP ranks of a row under context_parallel=dynamic; null = no limit."""
    split_samples: SplitSamples = "off"
    """auto: a long sample may be cut into pieces, in consecutive micro-batches of its DP ranks,
    where that is faster or it is over the budget."""
    least_piece: int | None = None
    """Tokens of the shortest piece under split_samples=auto; null = no limit, for hybrid models
    what a cut costs."""
    backward: Backward = "joint"
    """split: weight gradients are computed apart from input gradients, in a stage's idle time."""
    images: ImagePlace = "ahead"
    """ahead: each image is encoded once, before the rows of a step, on one of all GPUs. row: the
    first chunk encodes the images of each row, as models of other frameworks do."""
    max_patches_per_gpu: int | None = None
    """Patches of the images of a micro-batch under images=row, beside the budget of tokens; null =
    no limit."""
    adapters: AdapterRows = "group"
    """Of adapters in a row: group: several, side by side, or one in all rows where that costs
    nothing. one: one."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name}={brief(value)}; set one of {choices}")
        if self.count_rule == "per_rank":
            object.__setattr__(self, "count_rule", "legal")
        _check_int("search", self.search, 0)
        if self.max_live_tokens_per_gpu is not None:
            _check_int("max_live_tokens_per_gpu", self.max_live_tokens_per_gpu, 1)
        counts = ("max_width", "least_piece", "round_row_tokens", "row_shapes")
        for name in (*counts, "max_patches_per_gpu"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """Numbers of DP ranks that a row may lie over, ascending."""
        if self.context_parallel == "fixed":
            return (1,)
        return tuple(w for w in layout.widths if w <= (self.max_width or w))

    def row_lengths(self, layout: Layout, longest: int) -> tuple[int, ...]:
        """Tokens per GPU that rows may have under `row_shapes`, ascending; () if any.

        Equal parts of the longest row that there may be, rounded up to the alignment of rows over
        any number of DP ranks.

        Args:
            longest: tokens per DP rank.

        >>> Policy(row_shapes=3).row_lengths(Layout(cp=2), 2000)
        (334, 668, 1000)
        """
        if self.row_shapes is None:
            return ()
        rounded = layout.rounding(self.round_row_tokens)
        overs = [rounded.over(width) for width in self.widths(layout)]
        unit = math.lcm(*(over.row_alignment // over.cp for over in overs))
        most = max(longest // layout.cp // unit, 1)
        parts = range(1, self.row_shapes + 1)
        return tuple(sorted({-(-most * part // self.row_shapes) * unit for part in parts}))

    def within(self, max_width: int | None, least_piece: int | None) -> Self:
        """The same within a hybrid model's limits of what is allowed; None for no limit.

        A `max_width` of the policy counts if it is smaller, and its `least_piece` in any case.
        """
        changes: dict[str, Any] = {}
        if self.context_parallel == "dynamic" and max_width is not None:
            changes["max_width"] = min(self.max_width or max_width, max_width)
        if self.split_samples == "auto" and self.least_piece is None:
            changes["least_piece"] = least_piece
        return replace(self, **changes)

    def to_payload(self) -> dict[str, object]:
        """The fields as JSON types, in the order of their definition."""
        names = [field.name for field in fields(self)]
        # Left out at their defaults, so that plans from before they were fields keep their digests.
        later = {*names[names.index("share_prefixes") :], "round_row_tokens", "row_shapes"}
        own = {name: getattr(self, name) for name in names}
        return {n: v for n, v in own.items() if n not in later or v != getattr(Policy, n)}


_CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(Policy).items()
    if get_origin(hint) is Literal
}


class _Facts(NamedTuple):
    """What a rule may ask; None or False: not known yet."""

    policy: Policy
    layout: Layout | None
    micro_batch_size: int | None
    shares_fp8_scales: bool
    mtp_num_layers: int

    def has(self, setting: str, value: object) -> str:
        """ "setting='value'" if the policy has it, or any value if that is None; else ""."""
        own = getattr(self.policy, setting)
        has_it = own is not None if value is None else own == value
        return f"{setting}={own!r}" if has_it else ""

    @property
    def counts_samples(self) -> str:
        """Micro-batches of a number of samples."""
        size = self.micro_batch_size
        return "" if size is None else f"micro_batch_size={size}"

    @property
    def ahead(self) -> str:
        """Layers of multi-token prediction."""
        return f"mtp_num_layers={self.mtp_num_layers}" if self.mtp_num_layers else ""

    @property
    def delayed_fp8(self) -> str:
        """DP ranks that agree on the largest values of FP8 tensors."""
        is_one_rank = self.layout is not None and self.layout.dp == 1
        return "fp8_recipe='delayed'" if self.shares_fp8_scales and not is_one_rank else ""


class _Rule(NamedTuple):
    """Two settings that contradict each other."""

    setting: str
    value: str | None
    """None: any value."""
    other: Callable[[_Facts], str]
    """The other setting, as a message names it; "" where it is not set."""
    why: str
    """The reason, and what to set."""


_RULES = (
    _Rule(
        "row_shapes",
        None,
        lambda facts: facts.counts_samples,
        "rows of a number of samples have no longest length; set max_tokens_per_gpu, or "
        "row_shapes=None",
    ),
    _Rule(
        "context_parallel",
        "dynamic",
        lambda facts: facts.has("row_shape", "uniform"),
        "a row over several ranks leaves fewer tokens on each GPU than other rows; set "
        "row_shape='planned', or context_parallel='fixed'",
    ),
    _Rule(
        "context_parallel",
        "dynamic",
        lambda facts: facts.counts_samples,
        "rows are given to ranks by their tokens; set max_tokens_per_gpu, or "
        "context_parallel='fixed'",
    ),
    _Rule(
        "split_samples",
        "auto",
        lambda facts: facts.has("row_shape", "uniform"),
        "pieces are cut to equal work and so differ in length; set row_shape='planned', or "
        "split_samples='off'",
    ),
    _Rule(
        "split_samples",
        "auto",
        lambda facts: facts.counts_samples,
        "rows of a number of samples have whole ones; set max_tokens_per_gpu, or "
        "split_samples='off'",
    ),
    _Rule(
        "split_samples",
        "auto",
        lambda facts: facts.delayed_fp8,
        "ranks exchange their largest values after each forward and backward, and those with "
        "pieces run them in other orders; set split_samples='off', or tp_only_amax_red=True",
    ),
    _Rule(
        "split_samples",
        "auto",
        lambda facts: facts.ahead,
        "multi-token prediction needs tokens of a sample's next piece; set it to 0, or "
        "split_samples='off'",
    ),
    _Rule(
        "max_patches_per_gpu",
        None,
        lambda facts: facts.has("images", "ahead") or facts.counts_samples,
        "it bounds the images that rows within a budget of tokens encode; set "
        "max_patches_per_gpu=None, or images='row' and max_tokens_per_gpu",
    ),
    *(
        _Rule(
            whole,
            value,
            lambda facts, setting=setting, on=on: facts.has(setting, on),  # type: ignore[misc]
            f"rows {which} are planned whole, on one rank, in Megatron's order; set "
            f"{setting}={off!r}, or {whole}={instead!r}",
        )
        for whole, value, which, instead in (
            ("images", "row", "that encode images", "ahead"),
            ("adapters", "one", "of one adapter", "group"),
        )
        for setting, on, off in (
            ("context_parallel", "dynamic", "fixed"),
            ("split_samples", "auto", "off"),
            ("backward", "split", "joint"),
        )
    ),
)


def check_policy(
    policy: Policy,
    layout: Layout | None = None,
    micro_batch_size: int | None = None,
    *,
    shares_fp8_scales: bool = False,
    mtp_num_layers: int = 0,
) -> None:
    """Check a policy against itself and against what is known of a job.

    Args:
        layout: None: not known yet.
        micro_batch_size: that of a count-based plan.
        shares_fp8_scales: DP ranks agree on FP8 scales after each micro-batch.
        mtp_num_layers: layers of multi-token prediction.

    Raises:
        ConfigError: two settings contradict each other.
    """
    facts = _Facts(policy, layout, micro_batch_size, shares_fp8_scales, mtp_num_layers)
    for setting, value, other, why in _RULES:
        has, contradicts = facts.has(setting, value), other(facts)
        if has and contradicts:
            raise ConfigError(f"{has} with {contradicts}: {why}")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at least {least}")
    if value > _MAX_INT:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at most {_MAX_INT}")
