"""Packing strategies by the code of other schedulers itself, for comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megapack import Layout, cpu
from megapack.outlook.baselines import Ranks, Strategy


def verl_strategy() -> Strategy:
    """`kk_per_rank` by the installed package's own functions."""
    from verl.utils import seqlen_balancing as verl  # type: ignore[import-not-found]

    def plan(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
        weight = [int(w) for w in work]
        even = lengths.size % layout.dp == 0
        ranks = verl.get_seqlen_balanced_partitions(weight, layout.dp, equal_size=even)
        count = max(-(-int(lengths[part].sum()) // budget) for part in ranks)
        count = layout.next_legal_count(count, "multiple")
        out: Ranks = []
        for part in ranks:
            rows = verl.get_seqlen_balanced_partitions(
                [weight[i] for i in part], count, equal_size=False
            )
            rows = [[part[i] for i in row] for row in rows]
            rows.sort(key=lambda row: -sum(weight[i] for i in row))
            out.append(rows[::2][::-1] + rows[1::2])
        return out

    return plan


def megatron_strategies(folder: Path) -> dict[str, Strategy]:
    """The schedulers of Megatron-LM's dev branch: packing for fixed CP, and its dynamic CP.

    Args:
        folder: sources of the branch.
    """
    scheduler = megatron_scheduler(folder)

    def strategy(name: str) -> Strategy:
        def plan(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
            group = layout.group_size if layout.vpp > 1 else None
            return scheduler(name, budget, 1, layout.dp, group)(lengths)

        return plan

    return {
        "dp_balanced": strategy("DpBalancedScheduler"),
        "default_dynamic_cp": strategy("DefaultDynamicCPScheduler"),
    }


def megatron_scheduler(folder: Path) -> Callable[..., Callable[[np.ndarray], Ranks]]:
    """What makes a scheduler of Megatron-LM's dev branch, by the name of its class and its budget
    per rank, CP, DP and group of interleaved micro-batches: lengths -> rows of each rank.

    Args:
        folder: sources of the branch.
    """
    sys.path.insert(0, str(folder.resolve()))
    cpu.enable()
    from megatron.core.datasets import data_schedule

    def scheduler(
        name: str, budget: int, cp: int, dp: int, group: int | None
    ) -> Callable[[np.ndarray], Ranks]:
        def plan(lengths: np.ndarray) -> Ranks:
            groups = own.get_groups_and_subsamples(list(enumerate(lengths.tolist())))
            return [list(rows) for rows in zip(*groups, strict=True)]

        own = getattr(data_schedule, name)(budget, cp, dp, group)
        return plan

    return scheduler
