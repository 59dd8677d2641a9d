"""Images in hosts' steps: samples with pixels and grids, and a host's own model with its tower.

A sample's images stand at its beginning, each between two tokens; some samples have none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megapack import Layout
from tests.hosts.steps.job import Report

START, IMAGE, VIDEO, END = 96, 97, 98, 99
"""Token ids, the last ones of the toy's vocabulary; texts have lower ones."""
MERGE = 2
PATCH_NUMBERS = 3 * 2 * 2 * 2
_GRIDS = ((2, 2), (4, 6), (6, 4), (8, 8))
# Of three samples in turn.
_NUM_IMAGES = (1, 2, 0)

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

    from megapack.job.gpt.init import initialize_by_name
    from tests.dist import problem

    initialize_by_name(
        [model.language_model],
        seed=problem.SEED,
        std=problem.MODEL.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    generator = torch.Generator().manual_seed(problem.SEED)
    for name, param in tower_parameters([model]):
        drawn = torch.randn(param.shape, generator=generator) * 0.2
        param.data.copy_(1 + drawn if "norm" in name and name.endswith("weight") else drawn)


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
    """The tower's gradients, by name; {} on stages without it."""
    named = tower_parameters(chunks)
    return {name: param.main_grad.flatten().tolist() for name, param in named}


def assert_same_gradients(found: dict[str, Any], wanted: dict[str, Any], rel: float) -> None:
    """Each tensor's error is below `rel` of its norm, and none is nothing.

    Keys' biases have no gradient but rounding: softmax does not see them.
    """
    import torch

    assert found.keys() == wanted.keys()
    assert found
    for name, values in wanted.items():
        want, got = torch.tensor(values).double(), torch.tensor(found[name]).double()
        if name.endswith("qkv.bias"):
            parts = [tensor.chunk(3) for tensor in (want, got)]
            want, got = (torch.cat([query, value]) for query, _, value in parts)
        assert want.norm() > 1e-6, name
        assert float((got - want).norm() / want.norm()) < rel, name
