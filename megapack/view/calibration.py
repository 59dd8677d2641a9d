"""What the page of a run with `plan.calibrate=online` says about its fits.

calibration.jsonl -> fits since the run, or its layout, began -> facts, notes, what they gained
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapack.cost.model import CostModel
from megapack.errors import MegapackError
from megapack.outlook.regret import replanned_seconds
from megapack.view.records import Fit, RunRecords, number_or_none

# A rank on a busy machine may be slow and fast again at every other fit. Chosen by hand.
_MAX_MESSAGES = 8
# Weights of more chunks than this are shown as a range.
_MAX_WEIGHTS = 8


@dataclass(frozen=True)
class RunFits:
    """The fits of a run since it began, or since it went on with another layout."""

    first: CostModel | None
    """The model of that beginning; None if calibration.jsonl does not have it."""
    begin: int
    """The step after which it was in force."""
    fits: tuple[Fit, ...]

    @classmethod
    def of(cls, records: RunRecords) -> RunFits:
        """The fits of a run; without any if it has no calibration."""
        fits = records.fits
        starts = [index for index, fit in enumerate(fits) if fit.number == 0]
        if not starts:
            return cls(None, 0, fits)
        start = fits[starts[-1]]
        return cls(start.cost, start.step, fits[starts[-1] + 1 :])

    @property
    def last(self) -> CostModel | None:
        """The model in force at the end."""
        return self.fits[-1].cost if self.fits else self.first


def calibration_facts(records: RunRecords) -> list[tuple[str, str]]:
    """Facts about the fits of a run, and about what they predicted; none without calibration."""
    if not records.fits:
        return []
    calibration = RunFits.of(records)
    fits = calibration.fits
    num_left_out = sum(fit.num_left_out for fit in fits)
    text = f"{len(fits)}, the last after step {fits[-1].step}" if fits else "0"
    if num_left_out:
        text += f"; {num_left_out} steps of a rank left out"
    return [
        ("fits of the cost model", text),
        *_error_facts(fits),
        *_prediction_facts(records, calibration),
        *_model_facts(calibration),
    ]


def last_batch_facts(records: RunRecords) -> tuple[list[tuple[str, str]], list[str]]:
    """Facts and notes about the cost models of the last batch; none without fits.

    Its samples are planned by the first and by the last model, and the last one simulates both.
    """
    calibration = RunFits.of(records)
    first = calibration.first
    last = calibration.last
    facts = _basis_facts(records, calibration)
    if first is None or last is None or not calibration.fits:
        return facts, []
    if records.lengths is None:
        return facts, ["no lengths.txt: what the first model's plan would cost is not known"]
    try:
        costs = [first, last]
        at_first, now = replanned_seconds(records.plan, records.lengths, costs, true=last)
    except MegapackError as error:
        return facts, [f"what the first model's plan would cost is not known: {error}"]
    text = f"would take {at_first / now:.3f} times as long as the last model's (simulated)"
    notes = []
    if records.plan.prefixes is not None:
        notes.append("the first and the last model's plans were compared without shared prefixes")
    return [*facts, ("first model's plan", text)], notes


def calibration_notes(records: RunRecords) -> list[str]:
    """What turned out slow, and when."""
    found = [f"after step {fit.step}: {text}" for fit in records.fits for text in fit.messages]
    hidden = found[:-_MAX_MESSAGES]
    if not hidden:
        return found
    return [
        f"{len(hidden)} earlier findings about slow ranks and stages are in calibration.jsonl",
        *found[len(hidden) :],
    ]


def _error_facts(fits: Sequence[Fit]) -> list[tuple[str, str]]:
    before = next((fit.error_before for fit in fits if fit.error_before is not None), None)
    after = [fit.error_after for fit in fits if fit.error_after is not None]
    if before is None or not after:
        return []
    text = f"off by {before:.1%} before the first fit, by {after[-1]:.1%} after the last"
    return [("seconds of a row", text)]


def _prediction_facts(records: RunRecords, calibration: RunFits) -> list[tuple[str, str]]:
    """How far predictions were off after the first fit; before it both models are the same."""
    if not calibration.fits:
        return []
    begin = calibration.fits[0].step
    errors = []
    for line in records.metrics:
        keys = ("step_predicted_s", "step_predicted_at_start_s", "step_measured_s")
        in_force, at_start, measured = (number_or_none(line.get(key)) for key in keys)
        if line["step"] > begin and in_force is not None and at_start is not None and measured:
            errors.append((abs(in_force / measured - 1), abs(at_start / measured - 1)))
    if not errors:
        return []
    now, first = np.mean(errors, axis=0).tolist()
    text = f"off by {now:.1%} in the mean step; the first model by {first:.1%}"
    return [("predictions since the first fit", text)]


def _model_facts(calibration: RunFits) -> list[tuple[str, str]]:
    models = [model for model in (calibration.first, calibration.last) if model is not None]
    if calibration.first is None or not calibration.fits:
        models = models[-1:]

    def shown(name: str, texts: list[str]) -> tuple[str, str]:
        return f"cost model: {name}", " -> ".join(texts)

    facts = [
        shown("fixed, per chunk", [_seconds(model.fixed) for model in models]),
        shown("per token", [_seconds(model.per_token) for model in models]),
        shown("per squared token", [_seconds(model.per_token_sq) for model in models]),
        shown("backward over forward", [f"{model.backward_ratio:.2f}" for model in models]),
        shown("weights of the chunks", [_weights(model) for model in models]),
    ]
    if any(model.per_sample for model in models):
        facts.insert(3, shown("per sample", [_seconds(model.per_sample) for model in models]))
    # These two are fitted only where rows lie over several ranks, or backwards are split.
    if len({round(model.cp_overhead, 6) for model in models}) > 1:
        texts = [f"{m.cp_overhead:.1%} and {_seconds(m.cp_fixed)}" for m in models]
        facts.append(shown("each further rank of a row, and fixed", texts))
    if len({model.weight_ratio for model in models}) > 1:
        texts = [f"{model.weight_ratio:.2f}" for model in models]
        facts.append(shown("weight gradients over forward", texts))
    return facts


def _basis_facts(records: RunRecords, calibration: RunFits) -> list[tuple[str, str]]:
    cost = records.plan_cost
    if cost is None:
        return []
    steps = [fit.step for fit in calibration.fits if fit.cost == cost]
    if steps:
        return [("planned by", f"the fit after step {steps[0]}")]
    return [("planned by", "the first model")] if cost == calibration.first else []


def _seconds(value: float) -> str:
    """Seconds in the unit that gives 1 to 999 of them: 1.2e-5 is "12 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s" if value else "0"


def _weights(model: CostModel) -> str:
    weights = model.stage_weights
    if weights is None:
        return "equal"
    if len(weights) > _MAX_WEIGHTS:
        return f"{min(weights):.2f} to {max(weights):.2f}"
    return ", ".join(f"{weight:.2f}" for weight in weights)
