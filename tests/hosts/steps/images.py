"""Images in hosts' steps: samples with pixels and grids, and a host's own model with its tower.

A sample's images stand at its beginning, each between two tokens; some samples have none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megapack import Layout
from tests.hosts.steps.job import Report
from tools.hosting import import_stubs, sources

START, IMAGE, VIDEO, END = 96, 97, 98, 99
"""Token ids, the last ones of the toy's vocabulary; texts have lower ones."""
MERGE = 2
BRIDGE = "megatron-bridge==0.6.2"
_PACKAGES = (
    *("", ".utils", ".training", ".training.utils"),
    *(".models", ".models.qwen_vl", ".models.qwen_vl.modelling_qwen3_vl"),
)
PATCH_NUMBERS = 3 * 2 * 2 * 2
_GRIDS = ((2, 2), (4, 6), (6, 4), (8, 8))
# Of three samples in turn.
_NUM_IMAGES = (1, 2, 0)
WITHOUT = 2
"""The number of a sample without images."""

VISION_CONFIG: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 64,
}
"""Of transformers' towers of Qwen3-VL and Qwen3.5, without the decoder's width."""
MROPE_SECTION = [2, 1, 1]
"""Pairs of the toy's heads that turn by frame, row and column."""
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def draw_images(number: int) -> tuple[list[int], dict[str, Any] | None]:
    """The tokens of the images of sample `number`, and what a processor makes of the images."""
    import torch

    source = random.Random(number)
    sizes = [source.choice(_GRIDS) for _ in range(_NUM_IMAGES[number % len(_NUM_IMAGES)])]
    if not sizes:
        return [], None
    tokens: list[int] = []
    for high, wide in sizes:
        tokens += [START, *[IMAGE] * (high * wide // MERGE**2), END]
    generator = torch.Generator().manual_seed(number)
    num_patches = sum(high * wide for high, wide in sizes)
    return tokens, {
        "pixel_values": torch.randn(num_patches, PATCH_NUMBERS, generator=generator),
        "image_grid_thw": torch.tensor([(1, high, wide) for high, wide in sizes]),
    }


@functools.cache
def import_bridge_model() -> Any:
    """Megatron-Bridge's module of Qwen3VLModel; the rest of Bridge is a stand-in.

    It imports Transformer Engine, so the CPU must already be in CUDA's place.
    """
    import transformers.models.qwen3_vl.configuration_qwen3_vl  # noqa: F401

    sys.path.append(str(sources.installed("einops==0.8.1")))
    import_stubs.install("megatron.bridge", "megatron.training", "megatron.training.vocab_utils")
    # Its Python is that of 0.6's Megatron-Core; these modules run on an older one.
    folder = sources.installed(BRIDGE, python="3.12")
    packages = [importlib.import_module(f"megatron.bridge{name}") for name in _PACKAGES]
    for package in packages:
        package.__path__ = [str(folder.joinpath(*package.__name__.split(".")))]
    module = importlib.import_module(f"{packages[-1].__name__}.model")
    # Later imports of the others find the stand-ins.
    for package in packages:
        package.__path__ = []
    return module


def make_bridge_model(config: Any, **place: Any) -> Any:
    """Bridge's Qwen3-VL with DeepStack on the toy's decoder."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    from tests.dist import problem

    own = {
        **TOKENS,
        "vocab_size": problem.VOCAB_SIZE,
        "should_pad_vocab": False,
        "language_max_sequence_length": 4096,
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "mrope_section": MROPE_SECTION,
        "share_embeddings_and_output_weights": True,
        "fp16_lm_cross_entropy": False,
        "use_hf_vision_model": False,
        "vision_dp_when_cp": False,
        "spatial_merge_size": MERGE,
        "apply_rotary_pos_emb_in_fp32": False,
        "apply_rope_fusion": False,
    }
    for name, value in own.items():
        setattr(config, name, value)
    model = import_bridge_model().Qwen3VLModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        Qwen3VLVisionConfig(
            **VISION_CONFIG, out_hidden_size=config.hidden_size, deepstack_visual_indexes=[0]
        ),
        **place,
    )
    decoder = model.language_model
    decoder._postprocess = _without_newer_arguments(decoder._postprocess)
    return model


def _without_newer_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's method, which takes None for arguments that its release does not have yet."""
    known = inspect.signature(method).parameters

    def call(**arguments: Any) -> Any:
        assert all(value is None for name, value in arguments.items() if name not in known)
        return method(**{name: value for name, value in arguments.items() if name in known})

    return call


def image_chunks(
    layout: Layout, settings: dict[str, Any], make_model: Callable[..., Any], **ddp: Any
) -> list[Any]:
    """This rank's chunks of a host's own model, in Megatron's DDP; the groups are made.

    Args:
        settings: of the toy's config.
        make_model: of the config, and by name `pre_process`, `post_process` and `vp_stage`.
        ddp: options of Megatron's DDP.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType

    from megapack.job.gpt import build
    from tests.dist import problem
    from tests.dist.setup import on_kernels_of_job

    config = build.transformer_config(on_kernels_of_job(problem.MODEL), layout)
    for name, value in settings.items():
        setattr(config, name, value)
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for vp_stage in range(layout.vpp):
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = make_model(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=vp_stage if layout.vpp > 1 else None,
        )
        draw_weights(model)
        model.model_type = ModelType.encoder_or_decoder
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
        chunks.append(
            DistributedDataParallel(config, reduction, model, disable_bucketing=vp_stage > 0)
        )
    return chunks


def draw_weights(model: Any) -> None:
    """Weights that do not depend on the layout: the decoder's by name, the tower's in turn."""
    import torch
    from megatron.core import parallel_state

    from megapack.job.gpt.init import full_shape, initialize_by_name, local_slice
    from tests.dist import problem

    tp_group = parallel_state.get_tensor_model_parallel_group()
    initialize_by_name(
        [model.language_model],
        seed=problem.SEED,
        std=problem.MODEL.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=tp_group,
    )
    generator = torch.Generator().manual_seed(problem.SEED)
    for name, param in tower_parameters([model]):
        drawn = torch.randn(full_shape(param, tp_group.size()), generator=generator) * 0.2
        drawn += "norm" in name and name.endswith("weight")
        param.data.copy_(local_slice(drawn, param, tp_group.rank(), tp_group.size()))


def tower_parameters(chunks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Parameters outside of the decoder, with their names."""
    from megapack.model.head import unwrapped

    named = [pair for chunk in chunks for pair in unwrapped(chunk).named_parameters()]
    return [(name, param) for name, param in named if not name.startswith("language_model.")]


def watch_tower(report: Report, optimizer: Any, chunks: Sequence[Any]) -> None:
    """From here on, note the tower's gradients of the optimizer's first step, before it clips."""
    step = optimizer.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        report.more.setdefault("tower_gradients", gradients(chunks))
        return step(*args, **kwargs)

    optimizer.step = noted


def gradients(chunks: Sequence[Any]) -> dict[str, list[float]]:
    """The tower's whole gradients, by name; {} on stages without it."""
    named = tower_parameters(chunks)
    return {name: _whole_gradient(param).flatten().tolist() for name, param in named}


def _whole_gradient(param: Any) -> Any:
    """From all tensor-parallel ranks, if they split the parameter."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(param, "tensor_model_parallel", False):
        return param.main_grad
    parts = [torch.empty_like(param.main_grad) for _ in range(group.size())]
    dist.all_gather(parts, param.main_grad, group=group)
    return torch.cat(parts, dim=param.partition_dim)


def assert_same_gradients(found: dict[str, Any], wanted: dict[str, Any], rel: float) -> None:
    """Each tensor's error is below `rel` of its norm, and none is nothing."""
    assert found
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert gradient_error(found, wanted, name) < rel, name


def gradient_error(found: dict[str, Any], wanted: dict[str, Any], name: str) -> float:
    """Of a tensor, relative to its norm.

    Keys' biases have no gradient but rounding: softmax does not see them. transformers has queries,
    keys and values one after the other, Megatron those of a head.
    """
    import torch

    got, want = (torch.tensor(grads[name]).double() for grads in (found, wanted))
    if name.endswith("qkv.bias"):
        heads = VISION_CONFIG["num_heads"] if "linear_qkv" in name else 1
        got, want = (grad.view(heads, 3, -1)[:, ::2] for grad in (got, want))
    assert want.norm() > 1e-6, name
    return float((got - want).norm() / want.norm())
