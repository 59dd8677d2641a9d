"""The tower of the main job's model: transformers' module, built from the folder's config.json."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megapack.errors import ConfigError
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.hf_vision import VisionOptions
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt.init import freeze
from megapack.model.vision.mrope import Mrope
from megapack.model.vision.tower import VisionTower, in_dtype


def build_vision(model: ModelConfig, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """Build the tower for a model with `model.vision` on every rank; a collective of all ranks.

        tower = build_vision(model, distributed_optimizer=True)
        load_hf_weights([*chunks, tower], model.hf_path, device=device)
        optimizer = build_optimizer(optim, chunks, bf16=True, vision=tower)

    Its weights are as they were allocated: load them next. A frozen tower is in DDP, too, which
    then has no gradients to reduce. Nothing of DDP overlaps: a rank without images has no backward.

    Args:
        model: the options of `build_model`; of them `hf_path`, `vision`, `freeze`, `dtype` and
            `recompute`.
        distributed_optimizer: shard gradients and optimizer state over all ranks.

    Raises:
        ConfigError: on every rank: the model has no tower, a glob matches none of its parameters,
            or transformers is absent or older than 5.
    """
    options = None if model.hf_path is None else read_hf_config(model.hf_path).vision
    if options is None or model.vision == "off":
        raise ConfigError(
            f"model.hf_path={model.hf_path} with model.vision={model.vision} has no tower to "
            "build; set model.vision=train or frozen, and the folder of a model with images"
        )
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    tower = VisionTower(
        in_dtype(_module(options), dtype),
        mrope=Mrope(options.mrope_section, is_interleaved=options.mrope_interleaved),
        recompute=model.recompute == "full",
    )
    if model.vision == "frozen":
        tower.requires_grad_(False)
    freeze([tower], model.freeze_of(tower=True))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(tower.config, ddp, tower.cuda(), pg_collection=tower.groups)


def _module(options: VisionOptions) -> Any:
    """transformers' module. Not by its `from_pretrained`, which builds without memory and fills
    in what is in no file, such as rotary frequencies, by functions that `megapack.cpu` replaces."""
    try:
        from transformers import AutoConfig, AutoModel
        from transformers.initialization import no_init_weights
    except ImportError:
        raise ConfigError(
            "model.vision needs transformers 5; pip install transformers, or set model.vision=off"
        ) from None
    keys = {
        key: value
        for key, value in options.keys.items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    config = AutoConfig.for_model(options.model_type, **keys)
    with no_init_weights():
        return AutoModel.from_config(config, dtype=torch.float32)
