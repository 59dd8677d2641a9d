"""`CostModel`: the seconds that a micro-batch takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megapack.base.files import strict_json
from megapack.cost.fit import Measurement, fit_coefficients
from megapack.cost.sizes import ModelSizes
from megapack.errors import ConfigError, brief
from megapack.layout import Layout

_NUMBERS = ("fixed", "per_token", "per_token_sq", "per_sample", "backward_ratio", "p2p")


@dataclass(frozen=True)
class CostModel:
    """Seconds of a micro-batch, for the whole model's forward on one GPU group.

    With T row tokens (what is computed, so alignment and padding count) and n samples of aligned
    lengths L_i, the forward of one of the pp*vpp chunks takes

        fixed + (per_token * T + per_token_sq * sum(L_i^2) + per_sample * n) / (pp * vpp * cp)

    and its backward `backward_ratio` times that. L_i^2 stands for the attention of sample i, to
    which other samples of the row add nothing.

    Raises:
        ConfigError: a coefficient that is negative or not finite, or weights whose mean is not 1.
    """

    fixed: float = 0.0
    """Seconds of a chunk whatever it holds: launches, synchronization."""
    per_token: float = 0.0
    """Seconds per row token."""
    per_token_sq: float = 0.0
    """Seconds per squared sample token."""
    per_sample: float = 0.0
    """Seconds per sample."""
    backward_ratio: float = 2.0
    """Backward seconds over forward seconds."""
    stage_weights: tuple[float, ...] | None = None
    """Relative cost of the pp*vpp chunks in model order, mean 1; None = all alike."""
    p2p: float = 0.0
    """Seconds between the end of a chunk and the moment when the next chunk may begin."""
    fit_error: float | None = field(default=None, compare=False)
    """Mean relative error of the forward seconds that `fit` saw; None where nothing was fitted."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            _check_number(name, getattr(self, name))
        if self.stage_weights is not None:
            if not isinstance(self.stage_weights, Iterable):
                raise ConfigError(
                    f"stage_weights={brief(self.stage_weights)}; set one number per chunk"
                )
            weights = tuple(self.stage_weights)
            for weight in weights:
                _check_number("stage_weights", weight)
            if not weights or abs(sum(weights) / len(weights) - 1) > 1e-6:
                raise ConfigError(
                    f"stage_weights={brief(weights)} must have mean 1; divide them by their mean"
                )
            object.__setattr__(self, "stage_weights", weights)

    def forward_seconds(
        self, layout: Layout, *, row_tokens: int, tokens_sq: int, num_samples: int
    ) -> float:
        """Seconds of one chunk of weight 1.

        Args:
            row_tokens: T, per DP rank (before CP).
            tokens_sq: sum of squared aligned lengths.
            num_samples: real samples of the row.
        """
        work = self.per_token * row_tokens + self.per_token_sq * tokens_sq
        work += self.per_sample * num_samples
        return self.fixed + work / (layout.num_chunks * layout.cp)

    def weights_for(self, layout: Layout) -> tuple[float, ...]:
        """`stage_weights`, or ones, checked against the layout's number of chunks.

        Raises:
            ConfigError: the number of weights is not pp*vpp.
        """
        if self.stage_weights is None:
            return (1.0,) * layout.num_chunks
        if len(self.stage_weights) != layout.num_chunks:
            raise ConfigError(
                f"{len(self.stage_weights)} stage_weights for pp*vpp={layout.num_chunks} chunks; "
                "give one per chunk"
            )
        return self.stage_weights

    def to_json(self) -> str:
        """All fields as a JSON object; `from_json` is the exact inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The model that `to_json` wrote.

        Raises:
            ConfigError: not a JSON object of these fields.
        """
        try:
            payload = strict_json(text)
        except ValueError as error:
            raise ConfigError(
                f"not a cost model in JSON ({error}); give what to_json wrote"
            ) from None
        if not isinstance(payload, dict):
            raise ConfigError(f"a cost model is {brief(payload)}; give a JSON object")
        known = set(asdict(cls()))
        unknown = sorted(set(payload) - known)
        if unknown:
            names = ", ".join(sorted(known))
            raise ConfigError(f"unknown cost model fields {brief(unknown)}; set some of {names}")
        if isinstance(payload.get("stage_weights"), list):
            payload["stage_weights"] = tuple(payload["stage_weights"])
        return cls(**payload)

    @classmethod
    def from_model(
        cls,
        sizes: ModelSizes,
        *,
        layout: Layout,
        flops_per_gpu: float,
        fixed: float = 0.0,
        mean_length: float = 4096.0,
    ) -> CostModel:
        """What a model's sizes say, for one TP group of the layout.

        Args:
            sizes: dense or with experts.
            layout: tp shares the work; pp*vpp chunks share the layers, with the embedding on the
                first and the vocabulary head on the last.
            flops_per_gpu: operations per second that are reached, 4e14 for one.
            fixed: seconds per chunk and micro-batch that sizes do not tell.
            mean_length: tokens of a typical sample, for the weights of the stages.

        Raises:
            ConfigError: sizes that do not divide, or no speed.
        """
        _check_number("flops_per_gpu", flops_per_gpu)
        if flops_per_gpu == 0:
            raise ConfigError("flops_per_gpu=0; set the operations per second that are reached")
        speed = flops_per_gpu * layout.tp
        layers = sizes.num_layers
        per_token = layers * sizes.layer_flops_per_token() + sizes.head_flops_per_token()
        return cls(
            fixed=fixed,
            per_token=(per_token + sizes.embedding_flops_per_token()) / speed,
            per_token_sq=layers * sizes.layer_flops_per_token_sq() / speed,
            stage_weights=sizes.stage_weights(layout, mean_length),
        )

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], *, layout: Layout | None = None) -> CostModel:
        """The model nearest to measured seconds of single chunks, by non-negative least squares.

        Args:
            measurements: (row_tokens, tokens_sq, num_samples, forward_seconds, backward_seconds)
                of micro-batches of different sizes; the last may be left out.
            layout: the one that was measured; None for one chunk on one GPU.

        Returns:
            The model, with the mean relative error in `fit_error`.

        Raises:
            DataError: no measurements, or seconds that are not positive.
        """
        found = fit_coefficients(measurements, layout or Layout())
        return cls(
            fixed=found.fixed,
            per_token=found.per_token,
            per_token_sq=found.per_token_sq,
            per_sample=found.per_sample,
            backward_ratio=found.backward_ratio,
            fit_error=found.relative_error,
        )


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be larger than any float; NaN is not at least 0.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{name}={brief(value)}; set a finite number of at least 0")


TOKENS = CostModel(per_token=1.0)
"""What `cost=None` means: a row costs its tokens."""
