"""The rows that `calibrate.py` measures, and the cost model that follows from their seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megapack.cost import CostModel, StageLayers
from megapack.cost.fit import Measurement
from megapack.errors import ConfigError, DataError
from megapack.layout import Layout

# Row tokens over the budget, chosen by hand. Planned rows are near the budget, so half of these
# shares are 1/2 or more. A budget of 16384 gives rows of 1024, 2048, 4096, 8192, 12288 and 16384.
_SHARES_OF_BUDGET = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
# The shortest samples of a row have about this many tokens: 256 samples in a row of 16384. Chosen
# by hand.
_SHORT_TOKENS = 64
# Most rows of equal tokens, in numbers of samples that grow by equal ratios: 16384 tokens with
# samples of up to 8192 become 2, 10, 51 and 256 samples. Chosen by hand.
_MAX_COUNTS = 4


def grid(budget: int, longest: int, unit: int = 1) -> list[list[int]]:
    """Sample lengths of the rows to measure, by row tokens, from few long samples to many short.

    Rows with equal tokens and different numbers of samples separate the cost of a squared token
    from the cost of a sample.

    Args:
        budget: tokens of the longest row, per DP rank (before CP).
        longest: tokens that one sample may have.
        unit: lengths are multiples of this, so that alignment adds no padding.

    Raises:
        ConfigError: the budget or the longest sample is below one unit.
    """
    if min(budget, longest) < unit:
        raise ConfigError(
            f"rows of {budget} tokens and samples of {longest}, alignment {unit}; set "
            f"plan.max_tokens_per_gpu and data.max_length to {unit} or more"
        )
    rows = []
    for share in _SHARES_OF_BUDGET:
        units = max(1, int(budget * share) // unit)
        fewest = -(-units // (longest // unit))
        most = -(-units * unit // _SHORT_TOKENS)
        counts = _spread(fewest, min(units, max(fewest, most)))
        rows += [[unit * part for part in _equal_parts(units, count)] for count in counts]
    return rows


def fit_whole_model(measured: Sequence[Measurement], layout: Layout) -> CostModel:
    """Fit the cost model of a layout to seconds of all layers on one pipeline stage.

    A chunk is assumed to need 1 / (pp*vpp) of these seconds. That includes the fixed seconds,
    because launches belong to layers. The measurement does not include what a pipeline adds to each
    chunk (its schedule, sending).

    The sum of forward and backward is fitted, because a training step runs both, and `fit_error` is
    the error of the sum. One ratio for all rows then splits the sum, although short rows may have a
    different ratio.

    Args:
        measured: rows with both times, on the tp and cp of the layout, with pp=vpp=1. Those over
            several DP ranks give `cp_overhead` and `cp_fixed`, the others all the rest.
        layout: the layout to plan for.

    Raises:
        DataError: no rows, or seconds that are not positive.
    """
    alone = on_one_rank(measured)
    forward_s = sum(row.forward_seconds for row in alone)
    forward_share = forward_s / sum(map(total_seconds, alone)) if alone else 1.0
    rows = []
    for row in measured:
        total = total_seconds(row) / layout.num_chunks
        forward = total * forward_share
        backward = total - forward
        weight = row.weight_seconds
        if weight is not None:
            # A row with a longer forward than the ratio says has a shorter backward here.
            weight = min(weight / layout.num_chunks, backward)
        rows.append(
            row._replace(
                forward_seconds=forward,
                backward_seconds=backward,
                weight_seconds=weight,
            )
        )
    return CostModel.fit(rows, layout=layout)


def on_one_rank(measured: Sequence[Measurement]) -> list[Measurement]:
    """The rows that one DP rank had alone."""
    return [row for row in measured if row.width == 1]


def worth_sharing(rows: Sequence[list[int]], budget: int) -> list[list[int]]:
    """The rows of a grid to measure over several DP ranks too: those of half the budget or more.

    A planner shares long rows. Short ones are mostly launches, which sharing does not change.
    """
    return [row for row in rows if 2 * sum(row) >= budget]


def on_one_stage(cost: CostModel, layout: Layout) -> CostModel:
    """The same model for all layers on one stage, as `fit_whole_model` got them."""
    return dataclasses.replace(
        cost,
        fixed=cost.fixed * layout.num_chunks,
        cp_fixed=cost.cp_fixed * layout.num_chunks,
        stage_weights=None,
    )


def relative_errors(
    cost: CostModel, layout: Layout, measured: Sequence[Measurement]
) -> tuple[list[float], list[float]]:
    """Per row, predicted over measured seconds minus 1: for forward, and for forward + backward.

    Args:
        cost: a model of one chunk of the layout.
        measured: rows with both times.
    """
    forward = []
    both = []
    for row in measured:
        seconds = cost.forward_seconds(
            layout,
            row_tokens=row.row_tokens,
            tokens_sq=row.tokens_sq,
            num_samples=row.num_samples,
            width=row.width,
        )
        forward.append(seconds / row.forward_seconds - 1)
        both.append(seconds * (1 + cost.backward_ratio) / total_seconds(row) - 1)
    return forward, both


def weight_errors(cost: CostModel, layout: Layout, measured: Sequence[Measurement]) -> list[float]:
    """Per row, predicted over measured seconds of the weight gradients, minus 1.

    Args:
        cost: a model of one chunk of the layout.
        measured: rows with these seconds.
    """
    return [
        cost.weight_seconds(
            layout, row_tokens=row.row_tokens, num_samples=row.num_samples, width=row.width
        )
        / (row.weight_seconds or math.nan)
        - 1
        for row in measured
    ]


def stage_weights(
    whole_s: float, few_s: float, *, num_few: int, stage_layers: StageLayers
) -> tuple[float, ...]:
    """Cost of each chunk divided by their mean: its layers, and all the rest on the last chunk.

    Two depths on one stage separate the seconds of a layer from the rest: the embedding, the
    vocabulary head and the loss. Nearly all of the rest belongs to the last chunk.

    8 layers in 12 s and 2 layers in 6 s give 1 s per layer and 4 s for the rest. Four chunks of 2,
    2, 2 and 6 s have weights of 2/3, 2/3, 2/3 and 2.

    Args:
        whole_s: seconds of rows with all layers.
        few_s: seconds of the same rows with fewer layers.
        num_few: the number of these.
        stage_layers: layers of each chunk.

    Raises:
        DataError: more layers did not take longer.
    """
    num_layers = stage_layers.total
    if not 0 < few_s < whole_s:
        raise DataError(
            f"{num_layers} layers took {whole_s:.3g} s and {num_few} took {few_s:.3g} s: "
            "the machine is too busy to measure a difference; measure more rounds"
        )
    layer_s = (whole_s - few_s) / (num_layers - num_few)
    seconds = [layer_s * layers for layers in stage_layers.num_layers]
    seconds[-1] += max(0.0, whole_s - layer_s * num_layers)
    mean = sum(seconds) / len(seconds)
    return tuple(s / mean for s in seconds)


def total_seconds(row: Measurement) -> float:
    """Forward plus backward seconds."""
    return row.forward_seconds + (row.backward_seconds or 0.0)


def _spread(fewest: int, most: int) -> list[int]:
    """At most `_MAX_COUNTS` counts from `fewest` to `most`, in equal ratios."""
    steps = _MAX_COUNTS - 1
    ratio = (most / fewest) ** (1 / steps)
    return sorted({round(fewest * ratio**k) for k in range(steps + 1)})


def _equal_parts(units: int, count: int) -> list[int]:
    """`count` sizes that add up to `units` and differ by at most 1."""
    least, num_longer = divmod(units, count)
    return [least + 1] * num_longer + [least] * (count - num_longer)
