"""Cost models in files: `tools/calibrate.py` writes them, `plan.cost_model` names them."""

from __future__ import annotations

from pathlib import Path

from megapack.config.load import load_config
from megapack.cost.calibration import Calibration
from megapack.cost.model import CostModel
from megapack.errors import ConfigError
from megapack.layout import Layout


def read_cost(path: str | Path, layout: Layout) -> CostModel:
    """The cost model of a YAML file with a `cost` section.

    Raises:
        ConfigError: the file cannot be read or has unknown keys or bad numbers, or its
            `stage_weights` are for another number of chunks than the layout's.
    """
    cost = load_config(path, [], Calibration).cost
    try:
        cost.weights_for(layout)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return cost
