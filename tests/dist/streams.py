"""Models with several residual streams and hyper-connections (arXiv 2512.24880) between them.

Megatron-Core after 0.19 has the layers and a setting, but none of its specs builds them, and no
option of megapack's jobs does. Here the problem's model gets them as a loop of one's own would give
them: its spec and its config say so.

Megatron's main refuses them with pipeline stages, since its own exchanges are as wide as one
stream. Its blocks send all streams nevertheless, and planned exchanges are as wide, so the setting
is made after the config checked itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build
from tests.te_python import runs_te

NUM_STREAMS = 3


@dataclass(frozen=True)
class ModelWithStreams(ModelConfig):
    """A model with hyper-connections around attention and the MLP of each layer."""


def set_streams(config: Any) -> None:
    """Switch hyper-connections on in Megatron's config; main and its dev branch name them so."""
    own = {"enable_mhc_connections": True, "mhc_num_residual_streams": NUM_STREAMS}
    if not hasattr(config, "enable_mhc_connections"):
        own = {"enable_hyper_connections": True, "num_residual_streams": NUM_STREAMS}
    # After more iterations rows and columns sum to 1. The first layer, whose streams are equal,
    # then mixes them without effect, and gradients of how it does so are rounding errors.
    for name, value in {**own, "mhc_sinkhorn_iterations": 1}.items():
        setattr(config, name, value)
    # Without Transformer Engine Megatron cannot recompute them.
    if config.recompute_granularity == "selective" and runs_te():
        config.recompute_modules = [*config.recompute_modules, "mhc"]


def add_streams(spec: Any) -> None:
    """Give the spec of a layer hyper-connections, in place."""
    # Not at the top: Megatron-Core up to 0.19 has none.
    from megatron.core.transformer.hyper_connection import HyperConnectionModule
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    spec.module = HyperConnectionTransformerLayer
    spec.submodules.self_attention_hyper_connection = HyperConnectionModule
    spec.submodules.mlp_hyper_connection = HyperConnectionModule


@contextlib.contextmanager
def streams_of(model: ModelConfig) -> Iterator[None]:
    """Within the block, `build_model` gives such a model its streams."""
    if not isinstance(model, ModelWithStreams):
        yield
        return
    make_config, make_spec = build.transformer_config, build.block_spec

    def config_of(*args: Any, **kwargs: Any) -> Any:
        config = make_config(*args, **kwargs)
        set_streams(config)
        return config

    def spec_of(*args: Any, **kwargs: Any) -> Any:
        block = make_spec(*args, **kwargs)
        for spec in block.layer_specs:
            add_streams(spec)
        return block

    with mock.patch.multiple(build, transformer_config=config_of, block_spec=spec_of):
        yield
