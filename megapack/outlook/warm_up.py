"""Compiles the planner ahead of the first plan, by making small plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import plan_report
from megapack.policy import Policy
from megapack.prefixes import SharedPrefixes

# Seconds of one process for a usual policy, measured on an idle core; with every freedom it takes
# 160. The watchdog allows five times as many.
COMPILE_S = 60.0

# Sixteen short samples, of which eight have 300 tokens in common, and one that fills a row: pieces
# and wide rows are for that one. Their number does not change what is compiled.
_LENGTHS = np.array([500] * 16 + [2048])
_MAX_TOKENS = 2048
_SEARCH = 64
_MAX_LIVE = 1 << 20
_PREFIXES = SharedPrefixes(order=tuple(range(8)), common=(0, *[300] * 7))
# With a pipeline and without one, the search for better rows is another.
_LAYOUTS = (Layout(dp=4, pp=2, vpp=2), Layout(dp=4))

USUAL = (Policy(),)
"""What most jobs plan with."""
ALL = (
    *USUAL,
    Policy(max_live_tokens_per_gpu=_MAX_LIVE),
    Policy(context_parallel="dynamic"),
    Policy(split_samples="auto", backward="split"),
    Policy(split_samples="auto", backward="split", context_parallel="dynamic"),
)
"""Policies whose plans need all kernels."""


def compile_planner(policies: Sequence[Policy] = ALL) -> None:
    """Make small plans, so that what later plans of these policies need is compiled or loaded.

    One process of a machine compiles, and the others wait for it (`base.jit.kernel`).
    """
    # Limits that a user sets for real samples could refuse these.
    safe = [
        replace(
            policy,
            search=_SEARCH,
            unreachable="pad",
            oversize="alone",
            round_row_tokens=None,
            max_live_tokens_per_gpu=policy.max_live_tokens_per_gpu and _MAX_LIVE,
        )
        for policy in policies
    ]
    for policy, layout, prefixes in itertools.product(safe, _LAYOUTS, (None, _PREFIXES)):
        plan = build_dp_schedule(
            _LENGTHS,
            layout=layout,
            max_tokens_per_gpu=_MAX_TOKENS,
            policy=policy,
            prefixes=prefixes,
        )
        plan_report(plan, _LENGTHS)
    balanced = Policy(step_split="balanced")
    build_dp_schedule(_LENGTHS, layout=layout, micro_batch_size=1, num_steps=2, policy=balanced)
    naive_plans(plan, _LENGTHS)
