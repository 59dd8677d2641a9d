"""The content of a cost model's file: the model and the origin of its seconds.

`tools/calibrate.py` writes such files; `megapack.config.cost_file.read_cost` reads them.
"""

from __future__ import annotations

import dataclasses

from megapack.cost.model import CostModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """How a cost model's seconds were measured: a record for people, which no code reads."""

    command: str
    """The command that measured them."""
    date: str
    """Day of the measurement, YYYY-MM-DD."""
    device: str
    """The GPU or CPU."""
    versions: str
    """Versions of the packages that the seconds depend on."""
    num_rows: int
    """Rows that the model was fitted to."""
    worst_fit_error: float
    """Largest relative error of a row's forward plus backward; `fit_error` of the cost model is the
    mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The content of a cost model's file; `megapack.job.config.dump_yaml` writes it."""

    cost: CostModel
    """The cost model."""
    origin: Origin | None = None
    """None: the file was written by hand."""
