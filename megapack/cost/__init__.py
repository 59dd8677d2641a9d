"""Seconds and bytes of a micro-batch: the cost model, its fit, and the memory model.

Modules:
    model: CostModel: seconds of a micro-batch
    assumed: a cost model without measurements, on a GPU of an assumed speed
    fit: measurements -> coefficients (non-negative least squares)
    online: seconds of a run's steps -> CostModel (least squares with forgetting)
    slowness: ranks that are slow for a while
    sizes: ModelSizes: weights and floating-point operations of a transformer
    stages: LayerSplit -> StageLayers: transformer layers of each pipeline chunk
    activations: bytes that autograd keeps of a layer
    memory: bytes on one GPU, from a model's sizes and a layout
    head: positions that the vocabulary head handles at one time
    calibration: the content of a cost model's file
"""

from megapack.cost.fit import Measurement
from megapack.cost.model import TOKENS, CostModel
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import LayerSplit, StageLayers

__all__ = [
    "CostModel",
    "LayerSplit",
    "Measurement",
    "ModelSizes",
    "StageLayers",
    "TOKENS",
]
