"""Seconds and bytes of a micro-batch: the cost model, its fit, and the memory model.

The planner needs `model` only; what a model costs is loaded by those who ask for it.

Modules:
    model: CostModel: seconds of a micro-batch
    options, rope: ModelOptions: what is told of a model
    sizes: ModelSizes: kinds of layers, and chunks' shares of the operations
    layers, weights: weights and floating-point operations of one kind of layer
    stages: LayerSplit -> StageLayers: transformer layers of each pipeline chunk
    assumed: a cost model without measurements, on a GPU of an assumed speed
    fit: measurements -> coefficients (non-negative least squares)
    online: seconds of a run's steps -> CostModel (least squares with forgetting)
    slowness: ranks that are slow for a while
    activations: bytes that autograd keeps of a layer
    memory: bytes on one GPU, from a model's sizes and a layout
    head: positions that the vocabulary head handles at one time
    calibration: the content of a cost model's file
"""

from megapack.cost.model import CostModel, cost_in_tokens
from megapack.cost.stages import LayerSplit, StageLayers

__all__ = ["CostModel", "LayerSplit", "StageLayers", "cost_in_tokens"]
