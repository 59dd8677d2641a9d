"""Files of cost models: `tools/calibrate.py` writes them, `plan.cost_model` gives their path."""

from __future__ import annotations

from pathlib import Path

from megapack.config.load import load_config
from megapack.cost.calibration import Calibration
from megapack.cost.model import CostModel
from megapack.errors import ConfigError
from megapack.layout import Layout


def read_cost(path: str | Path, layout: Layout) -> CostModel:
    """Read the cost model from a YAML file with a `cost` section.

    Raises:
        ConfigError: the file cannot be read, has unknown keys or invalid numbers, or the number of
            its `stage_weights` or `square_factors` is not the layout's number of chunks.
    """
    cost = load_config(path, [], Calibration).cost
    try:
        cost.weights_for(layout)
        cost.factors_for(layout)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return cost
