"""A GPTModel that a user has built, beside a tower of transformers; and calls that are refused.

torchrun --nproc-per-node 2 -m tests.dist.vision.own_model_worker DP
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megapack import Layout, build_dp_schedule, launch
from megapack.errors import MegapackError
from megapack.job.gpt.specs import local_layer_spec
from megapack.loss import SFT
from megapack.model.vision.mrope import Mrope
from megapack.model.vision.tower import VisionTower, in_dtype
from megapack.samples import SampleBatch, TensorField
from megapack.schedule import ScheduleAdapter
from tests.dist.vision.vision_samples import make_batch, make_samples


def made_tower() -> VisionTower:
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        patch_size=4,
        out_hidden_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    visual = Qwen3VLVisionModel(config)
    for param in visual.parameters():
        param.data.normal_(std=0.1)
    return VisionTower(visual, mrope=Mrope((4, 2, 2), is_interleaved=True))


def made_decoder(**options: Any) -> tuple[TransformerConfig, GPTModel]:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        **options,
    )
    model = GPTModel(
        config,
        local_layer_spec(config),
        vocab_size=264,
        max_sequence_length=4096,
        position_embedding_type="rope",
    )
    return config, model


def refused(call: Any) -> str:
    """The error of a call."""
    try:
        call()
    except MegapackError as error:
        return str(error)
    return ""


def main(dp: str) -> None:
    """Print the tower's gradient norm, and what refused calls say."""
    launch.start("cpu")
    layout = Layout(dp=int(dp))
    parallel_state.initialize_model_parallel()
    tower = made_tower()
    config, model = made_decoder()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunk = DistributedDataParallel(config, ddp, model)
    batch = make_batch(make_samples())
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=96)
    messages = {
        "no tower": refused(
            lambda: ScheduleAdapter([chunk], layout=layout).step(plan, batch, objective=SFT())
        ),
        "no DDP": refused(lambda: ScheduleAdapter([chunk], layout=layout, vision=tower)),
        "not a tower": refused(
            lambda: ScheduleAdapter([chunk], layout=layout, vision=torch.nn.Linear(1, 1))
        ),
    }
    wrapped = DistributedDataParallel(tower.config, ddp, tower, pg_collection=tower.groups)
    adapter = ScheduleAdapter([chunk], layout=layout, vision=wrapped)
    result = adapter.step(plan, batch, objective=SFT())
    grads = [param.main_grad.double() for param in tower.parameters()]
    norm = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())

    def changed(**values: Any) -> SampleBatch:
        images = [[dataclasses.replace(r, **values) for r in s.refs] for s in make_samples()]
        every = make_samples()
        return SampleBatch([s.ids for s in every], images=images)

    for name, wrong in {
        "pixels": changed(pixels=lambda: torch.zeros(3, 96)),
        "no pixels": changed(pixels=None),
    }.items():
        messages[name] = refused(lambda wrong=wrong: adapter.forward(plan, wrong))
    every = make_samples()
    tensors = {"other": TensorField([[1.0]] * len(every))}
    both = SampleBatch([s.ids for s in every], tensors=tensors, images=[s.refs for s in every])
    messages["tensors"] = refused(lambda: adapter.forward(plan, both))
    _, other = made_decoder(mtp_num_layers=None)
    other.config.mtp_num_layers = 1
    lone = made_tower()
    messages["mtp"] = refused(lambda: ScheduleAdapter([other], layout=layout, vision=lone))
    half = in_dtype(made_tower().visual, torch.bfloat16)
    if dist.get_rank() == 0:
        types = [next(half.parameters()).dtype, half.rotary_pos_emb.inv_freq.dtype]
        found = {"norm": norm, "loss": result.loss, "messages": messages, "types": str(types)}
        print("FOUND", json.dumps(found), flush=True)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
