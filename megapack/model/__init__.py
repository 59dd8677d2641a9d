"""A Megatron-Core GPT for packed rows, as the main job trains it.

Modules:
    build, specs, init: config and model chunks, layer specs, weights and frozen parameters
    sharded: a chunk's tensors with their names in the whole model
    settings: Megatron's settings for speed, chosen by device, model and layout
    head, logprobs, mtp: vocabulary or value head, log-probs in chunks, multi-token prediction
    products, liger: matrix products with fp32 results; Liger's kernel for log-probs
    attention, experts: packed attention; mixtures of experts
    replicas: weights that several ranks hold, compared bit by bit
    optimizer: Megatron's Adam and learning-rate schedule
    overlap: DDP's communication inside forwards and backwards
    weight_gradients: weight gradients that are computed later than the rest of a backward
"""

from megapack.model.build import build_model, initialize_parallel, transformer_config
from megapack.model.replicas import check_replicas

__all__ = [
    "build_model",
    "check_replicas",
    "initialize_parallel",
    "transformer_config",
]
