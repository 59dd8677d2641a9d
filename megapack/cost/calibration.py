"""The content of a cost model's file: the model, and where its seconds come from.

`tools/calibrate.py` writes such files; `megapack.config.cost_file.read_cost` reads them.
"""

from __future__ import annotations

import dataclasses

from megapack.cost.model import CostModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a cost model's seconds come from; for people to read."""

    command: str
    """What was run."""
    date: str
    """Day of the measurement, YYYY-MM-DD."""
    device: str
    """The GPU or CPU."""
    versions: str
    """Of the packages that the seconds depend on."""
    num_rows: int
    """Rows that the model was fitted to."""
    worst_fit_error: float
    """Largest relative error of their forward with backward; the cost's `fit_error` is the mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The content of a cost model's file; `megapack.config.dump_yaml` writes it."""

    cost: CostModel
    """The model; its file may be written by hand as well."""
    origin: Origin | None = None
    """None: not measured by the tool."""
