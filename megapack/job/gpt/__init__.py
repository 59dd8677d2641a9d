"""The main job's GPT: Megatron-Core's, built for packed rows from the sections of a config.

Modules:
    build: config and model chunks
    specs: Megatron's layer specs with attention for packed rows
    rope: frequencies of rotary embeddings, as transformers computes them
    settings: Megatron's settings for speed, chosen by device, model and layout
    init: initial weights, and frozen parameters
    optimizer: Megatron's Adam and learning-rate schedule
    vision: the tower of a model with images
"""

from megapack.job.gpt.build import build_model, initialize_parallel, transformer_config
from megapack.job.gpt.vision import build_vision

__all__ = [
    "build_model",
    "build_vision",
    "initialize_parallel",
    "transformer_config",
]
