"""How a model is spread over GPUs, and the arithmetic that follows from it.

Alignment, legal micro-batch counts and group sizes are computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from megapack.errors import ConfigError, brief

# A number, or an array of them.
Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])

CountRule = Literal["legal", "multiple", "per_rank"]
Fp8 = Literal["mxfp8", "blockwise", "nvfp4"] | bool

# The sequence dimension of a GEMM must be a multiple of this many tokens, by recipe. Transformer
# Engine's NVFP4 quantizer takes blocks of 16 tokens, but a product over tokens (of weight
# gradients) reads at addresses of 16 bytes, which are 32 values of 4 bits.
_FP8_UNIT_TOKENS: dict[object, int] = {
    False: 1,
    True: 16,
    "mxfp8": 32,
    "blockwise": 128,
    "nvfp4": 32,
}

# Largest parallel size, 1,048,576 GPUs: a size given by mistake must not allocate all memory.
_MAX_SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of a job's parallel groups, unchecked; dp may be unknown. A `Layout` is complete."""

    dp: int | None = None
    """Data-parallel ranks; null = ranks of the job / (tp * pp * cp)."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks per stage; 1 = plain 1F1B, more = interleaved 1F1B."""
    cp: int = 1
    """Context-parallel ranks, over which each row is cut."""
    ep: int = 1
    """Expert-parallel ranks; etp * ep divides dp * cp * tp."""
    etp: int | None = 1
    """Tensor-parallel ranks of each expert, a divisor of tp; null = tp."""
    sequence_parallel: bool = False
    """Split activations outside attention over tensor-parallel ranks. Needs tp > 1."""
    microbatch_group_size: int | None = None
    """G: micro-batches that a stage runs through one chunk before the next; null = pp. Needs vpp >
    1."""


@dataclass(frozen=True, kw_only=True)
class Layout(ParallelSizes):
    """How a model is spread over GPUs: the sizes of a job's parallel groups.

        layout = Layout(dp=2, pp=4, vpp=2)
        layout.world_size  # 8 GPUs

    Raises:
        ConfigError: a size is not a positive integer, or sizes contradict each other.
    """

    dp: int = 1
    """Data-parallel ranks: the ranks of a plan."""
    etp: int = 1
    """Tensor-parallel ranks of each expert, a divisor of tp; None becomes tp. With 1, experts are
    not split by tensor parallelism and ep may span its ranks."""
    fp8: Fp8 = False
    """FP8 or FP4 recipe, for alignment: True (16 tokens), "mxfp8" or "nvfp4" (32), or "blockwise"
    (128)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "vpp", "cp", "ep"):
            _check_size(name, getattr(self, name))
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        _check_size("etp", self.etp)
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"sequence_parallel={brief(self.sequence_parallel)}; set True or False"
            )
        if not isinstance(self.fp8, bool | str) or self.fp8 not in _FP8_UNIT_TOKENS:
            choices = '"mxfp8", "blockwise" or "nvfp4"'
            raise ConfigError(f"fp8={brief(self.fp8)}; set False, True, {choices}")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp={self.vpp} with pp=1; set pp > 1 or vpp=1")
        self._check_experts()
        self._check_group_size()

    def _check_experts(self) -> None:
        if self.tp % self.etp:
            raise ConfigError(
                f"etp={self.etp} does not divide tp={self.tp}; set etp to 1 or tp, or to another "
                "divisor of tp"
            )
        stage_ranks = self.dp * self.cp * self.tp
        if stage_ranks % (self.etp * self.ep):
            size = f"ep={self.ep}" if self.etp == 1 else f"etp*ep={self.etp}*{self.ep}"
            raise ConfigError(
                f"{size} does not divide dp*cp*tp={stage_ranks}; set ep to a divisor of "
                f"{stage_ranks // self.etp}"
            )

    def to_payload(self) -> dict[str, Any]:
        """The fields as JSON types, as a plan stores and digests them.

        `etp` is left out where it has the value that plans had before it was a field, so that these
        plans keep their digests.
        """
        payload = asdict(self)
        if self.etp == self._etp_if_absent:
            del payload["etp"]
        return payload

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Layout:
        """The layout of a plan's payload; absent fields have their defaults.

        Raises:
            ConfigError: see the class.
        """
        layout = cls(**payload)
        return layout if "etp" in payload else replace(layout, etp=layout._etp_if_absent)

    @property
    def _etp_if_absent(self) -> int:
        """1 without expert parallelism; else tp, Megatron's default, where the ranks allow it."""
        return 1 if self.ep == 1 or (self.dp * self.cp) % self.ep else self.tp

    def _check_group_size(self) -> None:
        group = self.microbatch_group_size
        if group is None:
            return
        _check_size("microbatch_group_size", group)
        if self.vpp == 1:
            raise ConfigError(
                f"microbatch_group_size={group} with vpp=1; it needs vpp > 1: leave it out"
            )
        if group < self.pp:
            raise ConfigError(
                f"microbatch_group_size={group} is below pp={self.pp}; set {self.pp} or more"
            )

    @property
    def label(self) -> str:
        """The sizes on one line, for people; etp only if it is not 1.

        >>> Layout(dp=2, tp=2, ep=2, etp=2).label
        'dp=2 tp=2 pp=1 vpp=1 cp=1 ep=2 etp=2'
        """
        names = ("dp", "tp", "pp", "vpp", "cp", "ep", *(("etp",) if self.etp > 1 else ()))
        return " ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def world_size(self) -> int:
        """GPUs (processes) of the job."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def group_size(self) -> int:
        """G: consecutive micro-batches that a stage runs through one chunk before the next."""
        return self.microbatch_group_size or self.pp

    @property
    def num_chunks(self) -> int:
        """Model chunks along the whole pipeline."""
        return self.pp * self.vpp

    @property
    def expert_dp(self) -> int:
        """Ranks of a pipeline stage that hold the same part of the same experts."""
        return self.dp * self.cp * self.tp // (self.etp * self.ep)

    @property
    def ep_spans_dp(self) -> bool:
        """Whether DP ranks exchange tokens of the experts, and so synchronize in every layer.

        Megatron numbers the ranks of a stage by tp, then cp, then dp; and again by etp, then ep,
        then expert dp. So a DP rank is tp * cp consecutive ranks, and a group that exchanges tokens
        is etp * ep consecutive ranks. These groups lie within DP ranks if etp * ep divides tp * cp:
        tp=4, ep=4 with etp=1 stays within, with etp=4 it spans 4 DP ranks.
        """
        return (self.tp * self.cp) % (self.etp * self.ep) != 0

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Numbers of DP ranks that a row may lie over: the powers of two up to dp.

        >>> Layout(dp=6).widths
        (1, 2, 4)
        """
        return tuple(1 << k for k in range(self.dp.bit_length()))

    def over(self, width: int) -> Layout:
        """The layout as a row over `width` DP ranks sees it: they are CP ranks of the row.

        >>> Layout(dp=8, cp=2).over(4).label
        'dp=2 tp=1 pp=1 vpp=1 cp=8 ep=1'
        """
        return self if width == 1 else _widened(self, width)

    def rounding(self, row_tokens: int | None, lengths: tuple[int, ...] = ()) -> Layout:
        """The layout as a plan sees it whose rows are rounded; itself if nothing is to be rounded.

        Args:
            row_tokens: `Policy.round_row_tokens`.
            lengths: tokens per GPU that rows may have, ascending; (): any.

        >>> Layout(cp=2).rounding(1000).aligned_row_tokens(1001)
        2000
        >>> Layout(cp=2).rounding(None, (300, 800)).aligned_row_tokens(1001)
        1600
        """
        if row_tokens is None and not lengths:
            return self
        sizes = {field.name: getattr(self, field.name) for field in fields(Layout)}
        return _RoundedLayout(**sizes, row_unit_tokens=row_tokens or 1, lengths=lengths)

    @property
    def fp8_unit_tokens(self) -> int:
        """Tokens of a GPU's GEMMs are a multiple of this, by the FP8 recipe; 1 without FP8."""
        return _FP8_UNIT_TOKENS[self.fp8]

    @property
    def sample_alignment(self) -> int:
        """Each sample is padded to a multiple of this many tokens: two zigzag slices per CP rank.

        Sequence parallelism adds no alignment here: it scatters the row, not the sample.
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def row_alignment(self) -> int:
        """Row tokens are a multiple of this.

        Outside attention a GPU holds row / cp tokens, or row / (cp * tp) under sequence
        parallelism. This number is a multiple of the FP8 unit, because Transformer Engine quantizes
        before it gathers. cp=2, tp=8, sequence parallelism and fp8=True give
        lcm(4, 2 * 8 * 16) = 256.
        """
        scatter = self.tp if self.sequence_parallel else 1
        return math.lcm(self.sample_alignment, self.cp * scatter * self.fp8_unit_tokens)

    def chunks_in_flight(self, stage: int = 0) -> int:
        """Largest number of a stage's forwards whose activations wait for their backward.

        One chunk is 1/vpp of the stage. The number is that of the warm-up forwards and one more:
        pp - stage in 1F1B, and 2 * (pp - stage - 1) + (vpp - 1) * G + 1 interleaved. Stage 0 holds
        the most: 4 in 1F1B with pp=4, and 6 + 4 + 1 = 11 with pp=4, vpp=2, G=4.
        """
        if self.vpp == 1:
            return self.pp - stage
        return 2 * (self.pp - stage - 1) + (self.vpp - 1) * self.group_size + 1

    def aligned_sample_tokens(self, real_tokens: Tokens) -> Tokens:
        """Padded tokens of a sample in a row; an array gives one number per sample.

        >>> Layout(cp=8).aligned_sample_tokens(17)
        32
        """
        return round_up(real_tokens, self.sample_alignment)

    def aligned_row_tokens(self, sample_tokens: Tokens) -> Tokens:
        """Length of a row whose aligned samples have this sum; an array gives one number per row.

        >>> Layout(cp=8, fp8=True).aligned_row_tokens(32 + 32)
        128
        """
        return round_up(sample_tokens, self.row_alignment)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens that a row may have, ascending; (): any multiple of the row alignment."""
        return ()

    def longest_row(self, limit: int) -> int:
        """Tokens of the longest row that there is within a limit; 0 if there is none.

        >>> Layout(cp=8, fp8=True).longest_row(300)
        256
        """
        return limit // self.row_alignment * self.row_alignment

    def padded_tokens(self, lengths: Iterable[int]) -> int:
        """Length of a row that holds samples of these lengths, with both alignments.

        >>> Layout(cp=8, fp8=True).padded_tokens([17, 17])
        128
        """
        return self.aligned_row_tokens(sum(map(self.aligned_sample_tokens, lengths)))

    def is_legal_count(self, num_microbatches: int, group_size: int | None = None) -> bool:
        """Whether Megatron runs a step of `num_microbatches` per DP rank.

        1F1B runs any M >= 1. Interleaved 1F1B needs M >= G, and M % G must be 0 or >= pp: with pp=4
        and G=8 it runs 8, 12, 13, 14, 15, 16, but not 9.

        Args:
            group_size: G; None for the layout's.
        """
        if self.vpp == 1:
            return num_microbatches >= 1
        group = group_size or self.group_size
        tail = num_microbatches % group
        return num_microbatches >= group and (tail == 0 or tail >= self.pp)

    def next_legal_count(self, num_microbatches: int, rule: CountRule = "legal") -> int:
        """The smallest M >= `num_microbatches` that the rule allows.

        "multiple" rounds up to a multiple of G, as other schedulers do. The others use
        every count that Megatron runs: with pp=4 and G=8, 9 becomes 12 and not 16.
        """
        count = max(1, num_microbatches)
        if self.vpp == 1:
            return count
        group = self.group_size
        count = max(count, group)
        tail = count % group
        if tail == 0 or (rule != "multiple" and tail >= self.pp):
            return count
        return count - tail + (group if rule == "multiple" else self.pp)


@dataclass(frozen=True, kw_only=True)
class _RoundedLayout(Layout):
    """A layout whose rows are also a multiple of a number of tokens, or have one of few lengths."""

    row_unit_tokens: int
    lengths: tuple[int, ...]
    """Tokens per GPU, ascending; () for any length."""

    @property
    def row_alignment(self) -> int:
        return math.lcm(super().row_alignment, self.row_unit_tokens)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """As `Layout.row_lengths`."""
        return tuple(length * self.cp for length in self.lengths)

    def aligned_row_tokens(self, sample_tokens: Tokens) -> Tokens:
        """As `Layout.aligned_row_tokens`; above the longest length it is any length.

        A row without samples has no padded tokens, whatever lengths there are.
        """
        padded = super().aligned_row_tokens(sample_tokens)
        if not self.lengths:
            return padded
        lengths = np.array((0, *self.row_lengths))
        found = lengths[np.minimum(np.searchsorted(lengths, padded), lengths.size - 1)]
        rows = np.maximum(found, padded)
        return int(rows) if isinstance(padded, int) else np.asarray(rows, dtype=np.int64)

    def longest_row(self, limit: int) -> int:
        """As `Layout.longest_row`."""
        if not self.lengths:
            return super().longest_row(limit)
        return max((length for length in self.row_lengths if length <= limit), default=0)


# Rows of a few widths ask for their layout again and again; making one checks all sizes.
@lru_cache(maxsize=256)
def _widened(layout: Layout, width: int) -> Layout:
    if width not in layout.widths:
        raise ConfigError(
            f"a row over {width} ranks with dp={layout.dp}; set one of {layout.widths}"
        )
    # Rows do not depend on experts, whose sizes may not divide the ranks of an odd dp.
    return replace(layout, cp=layout.cp * width, dp=layout.dp // width, ep=1, etp=1)


def block_ranks(rank: int, width: int) -> tuple[int, ...]:
    """The DP ranks of the aligned block of this width that a rank is in; () for width 1.

    >>> block_ranks(6, 4)
    (4, 5, 6, 7)
    """
    first = rank - rank % width
    return tuple(range(first, first + width)) if width > 1 else ()


def round_up(value: Tokens, unit: int) -> Tokens:
    """The smallest multiple of `unit` that is at least `value`; an array gives one per entry.

    >>> round_up(17, 16)
    32
    """
    return -(-value // unit) * unit


def fp8_rows(recipe: object) -> Fp8:
    """`Layout.fp8` for a model that trains with Megatron's `fp8_recipe` or `fp4_recipe`.

    >>> fp8_rows("mxfp8"), fp8_rows("delayed"), fp8_rows("nvfp4")
    ('mxfp8', True, 'nvfp4')
    """
    known: tuple[Literal["mxfp8", "blockwise", "nvfp4"], ...] = ("mxfp8", "blockwise", "nvfp4")
    return next((name for name in known if recipe == name), True)


def config_rows(config: Any) -> Fp8:
    """`Layout.fp8` for a model with this config of Megatron's."""
    for kind in ("fp8", "fp4"):
        if getattr(config, kind, None):
            return fp8_rows(getattr(config, f"{kind}_recipe", None))
    return False


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at least 1")
    if value > _MAX_SIZE:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at most {_MAX_SIZE}")
