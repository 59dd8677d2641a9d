"""In what two plans differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from megapack.plan import Plan, StepPlan

Place = tuple[int, int, int]
"""Step, DP rank, micro-batch."""


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Differences, each first in the first plan, then in the second; empty where there are none."""

    settings: dict[str, tuple[Any, Any]]
    """`layout.dp`, `policy.search`, `max_tokens_per_gpu` and so on."""
    steps: dict[int, tuple[str, str]]
    """Per step that differs its counts, G and sizes."""
    other_step: tuple[int, ...]
    """Samples that train in another step, or in only one of the plans."""
    other_rank: tuple[int, ...]
    """Samples of the same step on another DP rank."""
    other_microbatch: tuple[int, ...]
    """Samples of the same step and rank in another micro-batch."""
    digests: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs, the digests included."""
        return self.digests[0] == self.digests[1]


def diff_plans(a: Plan, b: Plan) -> PlanDiff:
    """Compare plan with plan: settings, steps, and where samples stand."""
    places_a, places_b = _places(a), _places(b)
    moved: tuple[list[int], list[int], list[int]] = ([], [], [])
    for sample in sorted(places_a.keys() | places_b.keys()):
        one, two = places_a.get(sample), places_b.get(sample)
        if one != two:
            level = 0 if one is None or two is None else _first_difference(one, two)
            moved[level].append(sample)
    steps = [
        tuple("absent" if step is None else _described(step) for step in pair)
        for pair in zip_longest(a.steps, b.steps)
    ]
    return PlanDiff(
        settings=_settings_diff(a, b),
        steps={number: (one, two) for number, (one, two) in enumerate(steps) if one != two},
        other_step=tuple(moved[0]),
        other_rank=tuple(moved[1]),
        other_microbatch=tuple(moved[2]),
        digests=(a.digest(), b.digest()),
    )


def _first_difference(one: Place, two: Place) -> int:
    return next(level for level in range(3) if one[level] != two[level])


def _places(plan: Plan) -> dict[int, Place]:
    return {
        sample: (number, rank, k)
        for number, step in enumerate(plan.steps)
        for rank, row in enumerate(step.ranks)
        for k, mb in enumerate(row)
        for sample in mb.samples
    }


def _settings_diff(a: Plan, b: Plan) -> dict[str, tuple[Any, Any]]:
    one, two = _settings(a), _settings(b)
    different = {key: (one[key], two[key]) for key in one if one[key] != two[key]}
    return {key: (_short(x), _short(y)) for key, (x, y) in different.items()}


def _settings(plan: Plan) -> dict[str, Any]:
    settings = {f"layout.{key}": value for key, value in asdict(plan.layout).items()}
    settings |= {f"policy.{key}": value for key, value in plan.policy.to_payload().items()}
    for key in ("max_tokens_per_gpu", "micro_batch_size", "forward_only", "num_samples"):
        settings[key] = getattr(plan, key)
    return settings | {"rollout_ids": plan.rollout_ids, "colocate_ids": plan.colocate_ids}


def _short(value: Any) -> Any:
    """Ids are as many as samples."""
    return f"{len(set(value))} ids" if isinstance(value, tuple) else value


def _described(step: StepPlan) -> str:
    counts = step.counts
    group = "" if step.group_size is None else f" G={step.group_size}"
    return (
        f"M={counts.microbatch_span}{group}, {counts.num_rows} rows, "
        f"{counts.num_samples} samples, {counts.row_tokens} row tokens, "
        f"{counts.num_dropped_rollouts} rollouts dropped"
    )
