"""Seconds and bytes of a micro-batch: the cost model, its fit, and the memory model.

model, calibration   CostModel and the content of its file
fit                  measurements -> coefficients (non-negative least squares)
sizes                floating-point operations of a transformer
memory               bytes of a GPU, from sizes and plans
"""

from megapack.cost.fit import Measurement
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes

__all__ = [
    "CostModel",
    "Measurement",
    "ModelSizes",
]
