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

from megapack.job.gpt.build import build_model as build_model
from megapack.job.gpt.build import initialize_parallel as initialize_parallel
from megapack.job.gpt.build import transformer_config as transformer_config
from megapack.job.gpt.vision import build_vision as build_vision
