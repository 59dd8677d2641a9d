"""Which rows `calibrate.py` measures, and a cost model from their seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megapack.cost import CostModel
from megapack.cost.fit import Measurement
from megapack.errors import ConfigError, DataError
from megapack.layout import Layout

# Rows of a plan stand near the budget, so half of the grid does.
_SHARES_OF_BUDGET = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
# Samples of about this many tokens are what a grid calls short.
_SHORT_TOKENS = 64
_MAX_COUNTS = 4


def grid(budget: int, longest: int, unit: int = 1) -> list[list[int]]:
    """Sample lengths of the rows to measure, by row tokens: few long samples to many short ones.

    Rows of equal tokens tell the cost of a squared token and of a sample apart.

    Args:
        budget: tokens of the longest row, per DP rank (before CP).
        longest: tokens that one sample may have.
        unit: lengths are multiples of it, so that alignment adds nothing.

    Raises:
        ConfigError: not one unit in the budget or in a sample.
    """
    if min(budget, longest) < unit:
        raise ConfigError(
            f"rows of {budget} tokens and samples of {longest}, alignment {unit}; set "
            f"plan.max_tokens_per_gpu and data.max_length to {unit} or more"
        )
    rows = []
    for share in _SHARES_OF_BUDGET:
        units = max(1, int(budget * share) // unit)
        fewest, most = -(-units // (longest // unit)), -(-units * unit // _SHORT_TOKENS)
        counts = _spread(fewest, min(units, max(fewest, most)))
        rows += [[unit * part for part in _equal_parts(units, count)] for count in counts]
    return rows


def fit_whole_model(measured: Sequence[Measurement], layout: Layout) -> CostModel:
    """The cost model of a layout, from seconds of all layers on one pipeline stage.

    A chunk is taken to need 1 / (pp*vpp) of them, its fixed seconds too: launches belong to layers.
    What a pipeline adds to each chunk (its schedule, sending) is not in the measurement.

    Forward and backward are fitted together, for a training step takes both, and `fit_error` is
    that of their sum. One ratio of all rows then parts them, though short rows may have another.

    Args:
        measured: rows with both times, on tp and cp as the layout has them, with pp=vpp=1.
        layout: the one to plan for.

    Raises:
        DataError: no rows, or seconds that are not positive.
    """
    chunks, forward_s = layout.num_chunks, sum(row.forward_seconds for row in measured)
    forward_share = forward_s / sum(map(_total_seconds, measured)) if measured else 1.0
    rows = []
    for row in measured:
        total = _total_seconds(row) / chunks
        forward = total * forward_share
        rows.append(row._replace(forward_seconds=forward, backward_seconds=total - forward))
    return CostModel.fit(rows, layout=layout)


def on_one_stage(cost: CostModel, layout: Layout) -> CostModel:
    """The same model for all layers on one stage: what `fit_whole_model` was given."""
    return dataclasses.replace(cost, fixed=cost.fixed * layout.num_chunks, stage_weights=None)


def relative_errors(
    cost: CostModel, layout: Layout, measured: Sequence[Measurement]
) -> tuple[list[float], list[float]]:
    """Per row predicted over measured seconds minus 1: forward, and forward with backward.

    Args:
        cost: a model of one chunk of the layout.
        measured: rows with both times.
    """
    forward, both = [], []
    for row in measured:
        seconds = cost.forward_seconds(
            layout,
            row_tokens=row.row_tokens,
            tokens_sq=row.tokens_sq,
            num_samples=row.num_samples,
        )
        forward.append(seconds / row.forward_seconds - 1)
        both.append(seconds * (1 + cost.backward_ratio) / _total_seconds(row) - 1)
    return forward, both


def stage_weights(
    whole_s: float, one_chunk_s: float, *, num_layers: int, num_chunks: int
) -> tuple[float, ...]:
    """Cost of the chunks over their mean: equal layers, and what is no layer on the last chunk.

    Two depths on one stage tell a layer's seconds from those of the embedding, the vocabulary head
    and the loss. These are all laid on the last chunk, where nearly all of them belong.

    Args:
        whole_s: seconds of rows with all layers.
        one_chunk_s: seconds of the same rows with the layers of one chunk.
        num_layers: of the whole model.

    Raises:
        DataError: more layers took no longer.
    """
    layers = num_layers // num_chunks
    if not 0 < one_chunk_s < whole_s:
        raise DataError(
            f"{num_layers} layers took {whole_s:.3g} s and {layers} took {one_chunk_s:.3g} s: "
            "the machine is too busy to tell; measure more rounds"
        )
    layer_s = (whole_s - one_chunk_s) / (num_layers - layers)
    chunk_s = layer_s * layers
    seconds = [chunk_s] * num_chunks
    seconds[-1] += max(0.0, whole_s - layer_s * num_layers)
    mean = sum(seconds) / num_chunks
    return tuple(s / mean for s in seconds)


def _total_seconds(row: Measurement) -> float:
    return row.forward_seconds + (row.backward_seconds or 0.0)


def _spread(fewest: int, most: int) -> list[int]:
    """A few counts from `fewest` to `most`, in equal ratios."""
    steps = _MAX_COUNTS - 1
    ratio = (most / fewest) ** (1 / steps)
    return sorted({round(fewest * ratio**k) for k in range(steps + 1)})


def _equal_parts(units: int, count: int) -> list[int]:
    """Sizes of sum `units` that differ by at most 1."""
    least, longer = divmod(units, count)
    return [least + 1] * longer + [least] * (count - longer)
