"""The GPT that the main job trains, from Megatron-Core's parts.

build, specs, init   TransformerConfig, layers, weights
head, logprobs, mtp  the vocabulary head or a value head, log-probs in chunks, extra depths
attention, experts   packed attention; mixtures of experts
optimizer            Megatron's optimizer and its schedule
"""

from megapack.model.build import build_model, initialize_parallel, transformer_config

__all__ = [
    "build_model",
    "initialize_parallel",
    "transformer_config",
]
