"""What each planning option of a plan gains: the plan beside others of the same samples.

plan -> per option: the policy with only this one changed -> plan -> simulated seconds
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megapack.cost.model import CostModel
from megapack.errors import ConfigError, PlanError
from megapack.pipeline.simulator import simulate_planned
from megapack.plan import facts
from megapack.plan.explanation import Explanation, Gain
from megapack.plan.plan import Plan
from megapack.policy import Policy

Planner = Callable[[Policy], Plan]
"""`build_dp_schedule`, with all arguments but the policy."""


def explain(plan: Plan, planner: Planner, cost: CostModel, *, has_prefixes: bool) -> Explanation:
    """Compare a plan with those that the planner makes if one option is changed.

    An option that is on is turned off, one that is off is turned on.

    Args:
        cost: seconds of micro-batches.
        has_prefixes: the planner is given what samples share.
    """
    own = _times(plan, cost)
    gains = []
    for freedom in facts.FEATURES:
        if freedom.setting == "images" and not plan.counts.num_images:
            continue
        value = getattr(plan.policy, freedom.setting)
        is_on = value == freedom.on
        refusal = ""
        other: _Times | None = None
        try:
            if freedom.setting == "share_prefixes" and not has_prefixes:
                raise ConfigError("no prefixes are given")
            other = _other_times(
                plan, planner, cost, {freedom.setting: freedom.off if is_on else freedom.on}
            )
        except (ConfigError, PlanError) as error:
            # What to set follows after the semicolon; that is for a policy that someone chose.
            refusal = str(error).split("; ")[0]
        with_it, without = (own, other) if is_on else (other, own)
        gain_range = None
        if with_it and without and len(with_it.seconds) > 1 and all(without.seconds):
            columns = zip(with_it.seconds, without.seconds, strict=True)
            found = sorted(1 - after / before for after, before in columns)
            gain_range = found[0], found[-1]
        gains.append(
            Gain(
                name=freedom.name,
                setting=freedom.setting,
                value=value,
                is_on=is_on,
                on=freedom.on,
                used=freedom.text(plan.counts) if freedom.shown(plan.counts) else "",
                seconds_with=with_it and with_it.seconds[0],
                seconds_without=without and without.seconds[0],
                live_with=with_it and with_it.live,
                live_without=without and without.live,
                gain_range=gain_range,
                refusal=refusal,
            )
        )
    return Explanation(tuple(gains))


@contextlib.contextmanager
def quiet_planner() -> Iterator[None]:
    """No warnings: the first plan has had them, such as samples over the budget."""
    loggers = logging.getLogger("megapack.planner")
    before = loggers.level
    loggers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loggers.setLevel(before)


class _Times(NamedTuple):
    seconds: list[float]
    """Of all steps, by each speed that attention's kernels may have."""
    live: float
    """The most live tokens of any step."""


def _times(plan: Plan, cost: CostModel) -> _Times:
    runs = [
        [simulate_planned(plan, step, own) for step in plan.steps] for own in cost.every_speed()
    ]
    seconds = [math.fsum(run.makespan for run in own) for own in runs]
    return _Times(seconds, max(run.peak_live_tokens for run in runs[0]))


def _other_times(plan: Plan, planner: Planner, cost: CostModel, change: dict[str, Any]) -> _Times:
    """Times of the plan under a changed policy.

    Raises:
        ConfigError, PlanError: there is no such plan, or it has other samples or larger rows, so
            that its time is no comparison.
    """
    with quiet_planner():
        other = planner(replace(plan.policy, **change))
    samples, others = plan.counts.num_samples, other.counts.num_samples
    if samples != others:
        raise PlanError(f"it would train on {others} samples in place of {samples}")
    row = _longest_row(other)
    if plan.capacity is not None and row > max(plan.capacity, _longest_row(plan)):
        raise PlanError(f"a row would hold {row} padded tokens, over the budget of {plan.capacity}")
    return _times(other, cost)


def _longest_row(plan: Plan) -> int:
    """Padded tokens that the longest row puts on one DP rank."""
    return max(-(-mb.padded_tokens // mb.width) for step in plan.steps for mb in step.microbatches)
