"""`CostModel`: predicted seconds of a micro-batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.files import strict_json
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError, brief, first_line
from megapack.layout import Layout

if TYPE_CHECKING:
    from megapack.cost.fit import Measurement
    from megapack.cost.sizes import ModelSizes

ASSUMED_SQUARES = (1.0, 0.7, 2.0)
"""`square_range` without measurements: kernels of attention on an H100 reach from 0.29 to 0.52 of
its peak (docs/maintainers/calibration.md)."""


@dataclass(frozen=True)
class CostModel:
    """Predicted seconds of a micro-batch, which the planner balances.

        cost = CostModel(per_token=2e-6, per_token_sq=3e-11)
        plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=16384, cost=cost)

    The coefficients are for the whole model's forward. With T row tokens (alignment and padding
    included, as they are computed too) and n samples of aligned lengths L_i, the forward of one of
    the pp*vpp chunks takes

        fixed + (per_token * T + per_token_sq * sum(L_i^2) + per_sample * n) / (pp * vpp * cp)

    times its weight; where chunks have other shares of attention, per_token_sq times its factor,
    and its backward takes `backward_ratio` times that. Of the backward, weight gradients take
    `weight_ratio` times the forward without per_token_sq. A row over `width` DP ranks is cut over
    cp * width ranks, and costs `cp_fixed` and `cp_overhead` more. L_i^2 accounts for the attention
    of sample i; tokens attend only within their sample.

    Raises:
        ConfigError: a coefficient is negative or not finite, or the mean of the weights is not 1.
    """

    fixed: float = 0.0
    """Seconds per chunk and micro-batch, independent of its tokens: launches, synchronization."""
    per_token: float = 0.0
    """Seconds per row token."""
    per_token_sq: float = 0.0
    """Seconds per squared sample token."""
    per_sample: float = 0.0
    """Seconds per sample."""
    backward_ratio: float = 2.0
    """Backward seconds over forward seconds."""
    stage_weights: tuple[float, ...] | None = None
    """Relative cost of the pp*vpp chunks in model order, mean 1; None = all equal."""
    square_factors: tuple[float, ...] | None = None
    """Of each chunk, the factor of `per_token_sq` beside its weight; 0 for one without attention
    layers, as a hybrid model may have; None = 1 for all."""
    p2p: float = 0.0
    """Seconds from the end of a chunk to the earliest start of the next chunk."""
    cp_overhead: float = 0.05
    """What a token costs more for each further DP rank that shares its row, as a share of
    `per_token`: keys and values are exchanged, and attention runs in more and smaller parts. Tokens
    of 1 s take 1.05 / 2 s over two ranks and 1.15 / 4 s over four; squared tokens take no more.
    0.05 is assumed until measured."""
    cp_overheads: tuple[float, ...] | None = None
    """What a token costs more over 2, 4, 8, ... ranks in all, in place of `cp_overhead`: (0.1, 0.3,
    2.0) if 8 ranks are on two nodes. Ranks beyond these cost their mean."""
    cp_fixed: float = 0.0
    """Seconds that a chunk takes more for a row over several DP ranks, whatever its length: the
    latency of the exchanges."""
    square_range: tuple[float, ...] = (1.0,)
    """Factors of `per_token_sq` that may be the truth: own orders are planned where they are faster
    under all. (1,) if measured."""
    weight_ratio: float = 1.0
    """Seconds of the weight gradients over those of the forward's part without attention. A product
    y = x W takes as long as dW = x^T dy, so 1 is assumed until measured."""
    per_patch: float = 0.0
    """Seconds of a tower's forward on one GPU, per patch of an image."""
    per_patch_sq: float = 0.0
    """The same per squared patches of an image. With both 0, images take no time, and are spread
    over GPUs by n + n^2 / 6600 for n patches."""
    per_image_token: float = 0.0
    """Seconds per image token until its features have come to the ranks that read them. Gradients
    take twice as long back: they are fp32."""
    tower_ratio: float = 2.0
    """Seconds of a tower's backward over those of its forward; 0 of a frozen one."""
    fit_error: float | None = field(default=None, compare=False)
    """Mean relative error of the fitted forward seconds; None = not fitted."""

    def __post_init__(self) -> None:
        for coefficient in fields(self):
            if coefficient.type == "float":
                _check_number(coefficient.name, getattr(self, coefficient.name))
        for name in ("stage_weights", "square_factors", "cp_overheads", "square_range"):
            given = getattr(self, name)
            if given is None:
                continue
            if not isinstance(given, Iterable):
                raise ConfigError(f"{name}={brief(given)}; set a list of numbers")
            numbers = tuple(given)
            for number in numbers:
                _check_number(name, number)
            object.__setattr__(self, name, numbers)
        speeds = self.square_range
        if not speeds or speeds[0] != 1 or min(speeds) <= 0:
            raise ConfigError(f"square_range={brief(speeds)}; set factors above 0, the first 1")
        weights = self.stage_weights
        # Loose enough for weights that were rounded to six decimals.
        if weights is not None and not (weights and abs(sum(weights) / len(weights) - 1) <= 1e-6):
            raise ConfigError(
                f"stage_weights={brief(weights)} must have mean 1; divide them by their mean"
            )

    def forward_seconds(
        self,
        layout: Layout,
        *,
        row_tokens: int,
        tokens_sq: int,
        num_samples: int,
        width: int = 1,
        square_factor: float = 1.0,
    ) -> float:
        """Seconds of one chunk of weight 1.

        Args:
            row_tokens: T, of the whole row (before CP).
            tokens_sq: sum of squared aligned lengths.
            num_samples: samples of the row.
            width: DP ranks that share the row.
            square_factor: of the chunk, see `square_factors`.
        """
        fixed, token_factor = self.over_ranks(width)
        work = self.per_token * token_factor * row_tokens
        work += square_factor * self.per_token_sq * tokens_sq + self.per_sample * num_samples
        return fixed + work * self.share_of_rank(layout, width)

    def weight_seconds(
        self, layout: Layout, *, row_tokens: int, num_samples: int, width: int = 1
    ) -> float:
        """Seconds of the weight gradients of one chunk of weight 1, a part of the backward's.

        Args:
            row_tokens, num_samples, width: see `forward_seconds`.
        """
        return self.weight_ratio * self.forward_seconds(
            layout, row_tokens=row_tokens, tokens_sq=0, num_samples=num_samples, width=width
        )

    def image_seconds(self, patches: Sequence[int] | Ints) -> Floats:
        """float64 [images]: seconds of the tower's forward of images with so many patches."""
        n = np.array(patches, dtype=np.float64)
        return self.per_patch * n + self.per_patch_sq * n * n

    def over_ranks(self, width: int) -> tuple[float, float]:
        """What `width` DP ranks change that share a row: the fixed seconds of a chunk, and the
        factor on `per_token`.

        With cp_overhead=0.05 the factor is 1 on one rank, 1.05 on two and 1.15 on four.
        """
        if width == 1:
            return self.fixed, 1.0
        each = self.cp_overhead
        if self.cp_overheads:
            level = min(width.bit_length() - 1, len(self.cp_overheads))
            each = self.cp_overheads[level - 1] / ((1 << level) - 1)
        return self.fixed + self.cp_fixed, 1.0 + each * (width - 1)

    def every_speed(self) -> list[CostModel]:
        """The model by each factor of `square_range`, as if that were measured."""
        if self.square_range == (1.0,):
            return [self]
        return [
            replace(self, per_token_sq=factor * self.per_token_sq, square_range=(1.0,))
            for factor in self.square_range
        ]

    @staticmethod
    def share_of_rank(layout: Layout, width: int = 1) -> float:
        """Part of a row that one chunk on one GPU computes, if `width` DP ranks share the row.

        With pp=4 and cp=1, a row of one rank is 1 / 4, and one over two ranks 1 / 8.
        """
        return 1.0 / (layout.num_chunks * layout.cp * width)

    def weights_for(self, layout: Layout) -> tuple[float, ...]:
        """`stage_weights`, or ones if None, checked against the layout's number of chunks.

        Raises:
            ConfigError: the number of weights is not pp*vpp.
        """
        return self._of_chunks("stage_weights", layout)

    def factors_for(self, layout: Layout) -> tuple[float, ...]:
        """`square_factors`, or ones if None, checked against the layout's number of chunks.

        Raises:
            ConfigError: the number of factors is not pp*vpp.
        """
        return self._of_chunks("square_factors", layout)

    def _of_chunks(self, name: str, layout: Layout) -> tuple[float, ...]:
        numbers: tuple[float, ...] | None = getattr(self, name)
        if numbers is None:
            return (1.0,) * layout.num_chunks
        if len(numbers) != layout.num_chunks:
            raise ConfigError(
                f"{len(numbers)} {name} for pp*vpp={layout.num_chunks} chunks; give one per chunk"
            )
        return numbers

    @property
    def distinct_factors(self) -> tuple[float, ...]:
        """The different `square_factors`; chunks of one factor are of one kind."""
        return (1.0,) if self.square_factors is None else tuple(dict.fromkeys(self.square_factors))

    def least_weights(self, layout: Layout) -> tuple[float, float]:
        """Weights of the busiest stage and of all chunks together, as lower bounds.

        Of rows whose squares are unknown, a stage's seconds are between those without and those of
        squares alone; the busiest stage has no less than the mean.
        """
        weights = np.array(self.weights_for(layout))
        total = float(weights.sum())
        stages = weights.reshape(layout.vpp, layout.pp).sum(axis=0)
        if self.square_factors is None:
            return float(stages.max()), total
        squares = weights * np.array(self.factors_for(layout))
        total = min(total, float(squares.sum()))
        stages = np.minimum(stages, squares.reshape(layout.vpp, layout.pp).sum(axis=0))
        return max(float(stages.max()), total / layout.pp), total

    def to_json(self) -> str:
        """All fields as a JSON object; `from_json` is the exact inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read the output of `to_json`.

        Raises:
            ConfigError: not a JSON object with these fields.
        """
        try:
            return cls(**strict_json(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"not a cost model in JSON ({first_line(error)}); give the output of to_json"
            ) from None

    @classmethod
    def from_model(
        cls,
        sizes: ModelSizes,
        *,
        layout: Layout,
        flops_per_gpu: float,
        fixed: float = 0.0,
        mean_length: float = 4096.0,
        head_factor: float = 1.0,
        attention_factor: float = 1.0,
        stage_layers: StageLayers | None = None,
    ) -> CostModel:
        """Derive the coefficients from a model's sizes and a GPU's speed.

        Args:
            sizes: sizes of the whole model: dense, with experts, or hybrid.
            layout: tp ranks share the work; pp*vpp chunks share the layers, with the embedding on
                the first and the vocabulary head on the last.
            flops_per_gpu: achieved operations per second, for example 4e14.
            fixed: seconds per chunk and micro-batch, which cannot be derived from sizes.
            mean_length: tokens of a typical sample, for `stage_weights` and sliding windows.
            head_factor: cost of the vocabulary head over that of its operations, relative to the
                layers.
            attention_factor: cost of attention over that of its operations, the same.
            stage_layers: layers of each chunk; None = equally many.

        Raises:
            ConfigError: the layers do not divide into chunks, or flops_per_gpu is not above 0.
        """
        _check_number("flops_per_gpu", flops_per_gpu)
        if flops_per_gpu == 0:
            raise ConfigError("flops_per_gpu=0; set the achieved operations per second")
        speed = flops_per_gpu * layout.tp
        weights, factors = sizes.chunk_weights(
            layout,
            mean_length,
            head_factor=head_factor,
            attention_factor=attention_factor,
            stage_layers=stage_layers,
        )
        kinds = list(sizes.layer_kinds(mean_length=mean_length, attention_factor=attention_factor))
        per_token = sum(n * kind.layer_flops_per_token() for kind, n in kinds)
        per_token += head_factor * sizes.head_flops_per_token()
        per_token_sq = sum(n * kind.layer_flops_per_token_sq() for kind, n in kinds)
        return cls(
            fixed=fixed,
            per_token=(per_token + sizes.embedding_flops_per_token()) / speed,
            per_token_sq=per_token_sq / speed,
            stage_weights=weights,
            square_factors=factors,
            square_range=ASSUMED_SQUARES,
        )

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], *, layout: Layout | None = None) -> CostModel:
        """Fit the coefficients to measured seconds of single chunks, by non-negative least squares.

        Args:
            measurements: (row_tokens, tokens_sq, num_samples, forward_seconds, backward_seconds,
                width, weight_seconds) of micro-batches of different sizes; the last three may be
                left out. Rows over several DP ranks give `cp_overhead` and `cp_fixed`, best if the
                same rows were measured on one rank, and rows with weight_seconds `weight_ratio`;
                without them these keep their defaults.
            layout: the measured layout; None for one chunk on one GPU.

        Returns:
            The model, with the mean relative error in `fit_error`.

        Raises:
            DataError: no measurements of rows of one rank, or seconds that are not positive.
        """
        # Here, so that the planner needs no least squares.
        from megapack.cost.fit import fit_coefficients

        return cls(**fit_coefficients(measurements, layout or Layout()))


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An int may exceed the largest float; every comparison with NaN is false.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name}={brief(value)}; set a finite number of at least 0")


FIXED_TOKENS = 256
"""Cost of a micro-batch on top of its tokens, in tokens, until it is measured. Chosen by hand."""
TOKENS_PER_SQUARE = 49152
"""A sample of so many tokens costs twice its tokens, until it is measured: a 7B dense model."""
# A tower of 0.5e9 parameters takes 1 GFLOP for a patch, where 7B take 14 for a token.
_TOKENS_PER_PATCH = 0.07
EVEN_PATCHES = 6600
"""Patches of an image whose attention takes as long as everything else: 4 d n of attention and
2 (4 d^2 + 2 d f) of products per patch, with d=1152 and f=4304, are equal at n=6,600."""


def cost_in_tokens(layout: Layout, *, per_token_sq: float = 1 / TOKENS_PER_SQUARE) -> CostModel:
    """The cost model where none is given, in units of one token's forward: no GPU speed is needed.

    Args:
        per_token_sq: cost of a squared token of a sample.
    """
    # Without a fixed cost more micro-batches would always be cheaper in a pipeline.
    fixed = FIXED_TOKENS / layout.num_chunks
    return CostModel(
        fixed=fixed,
        per_token=1.0,
        per_token_sq=per_token_sq,
        square_range=ASSUMED_SQUARES,
        # Latencies of a layer's exchange and products' part of a layer, as `cost.assumed` has them
        # for 7B on an H100. On tp GPUs tokens are cheaper, and latencies are not.
        cp_fixed=0.4 * layout.tp * fixed,
        weight_ratio=0.7,
        # One GPU encodes an image, and tp GPUs run a token.
        per_patch=layout.tp * _TOKENS_PER_PATCH,
        per_patch_sq=layout.tp * _TOKENS_PER_PATCH / EVEN_PATCHES,
    )
