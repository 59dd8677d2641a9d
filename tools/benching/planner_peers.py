"""Packing strategies of other schedulers by name, for tables and judges of plans."""

from __future__ import annotations

import numpy as np

from megapack import Layout
from megapack.outlook.baselines import HOSTS, Ranks, Strategy, first_fit_flops


def first_fit(sizes: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """`first_fit_flops` with ranks of about equal tokens."""
    return first_fit_flops(sizes, sizes.astype(np.float64), layout, budget)


BASELINES: dict[str, Strategy] = {
    way.__name__: way for _, ways in HOSTS.values() for way in ways.values()
} | {"first_fit": first_fit}
"""What other schedulers do."""
