"""A GPTModel that a user has built, beside a tower of transformers; and calls that are refused.

torchrun --nproc-per-node 2 -m tests.dist.vision.own_model_worker DP
torchrun --nproc-per-node 2 -m tests.dist.vision.own_model_worker TP without-ddp
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megapack import Layout, Plan, build_dp_schedule, launch
from megapack.errors import MegapackError
from megapack.images import ImageRef
from megapack.job.gpt.specs import local_layer_spec
from megapack.loss import SFT
from megapack.model.vision.mrope import Mrope
from megapack.model.vision.tower import VisionTower, in_dtype
from megapack.policy import Policy
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


def norm_of(grads: list[Tensor]) -> float:
    return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())


def wrapped(tower: VisionTower, groups: Any = None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(**{"use_distributed_optimizer": False, **options})
    groups = tower.groups if groups is None else groups
    return DistributedDataParallel(tower.config, ddp, tower, pg_collection=groups)


def planned(batch: SampleBatch, layout: Layout) -> Plan:
    images = [batch.images(i) for i in range(len(batch))]
    return build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=96, images=images)


def without_ddp(tp: int) -> dict[str, Any]:
    """Norms of the gradients of one step, and of two between which nothing is zeroed."""
    layout = Layout(dp=1, tp=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    _, model = made_decoder(tensor_model_parallel_size=tp)
    tower = made_tower()
    adapter = ScheduleAdapter([model], layout=layout, vision=tower)
    batch = make_batch(make_samples())
    plan = planned(batch, layout)
    norms = []
    for _ in range(2):
        adapter.step(plan, batch, objective=SFT())
        norms.append(norm_of([param.grad for param in tower.parameters()]))
    return {"norms": norms}


def kept_features(chunk: Any, layout: Layout) -> dict[str, float]:
    """By how much log-probs change with the weights of a frozen tower."""
    tower = made_tower()
    tower.requires_grad_(False)
    batch = make_batch(make_samples())
    plan = planned(batch, layout)
    frozen = wrapped(tower)

    def logprobs(adapter: ScheduleAdapter) -> Tensor:
        return torch.cat(adapter.forward(plan, batch)["logprobs"])

    adapter = ScheduleAdapter([chunk], layout=layout, vision=frozen)
    before = logprobs(adapter)
    for param in tower.parameters():
        param.data.copy_(1.3 * param)
    after = logprobs(adapter)
    true = logprobs(ScheduleAdapter([chunk], layout=layout, vision=frozen))
    return {
        "change": float((true - before).abs().max()),
        "error": float((true - after).abs().max()),
    }


def after_a_rank_failed(chunk: Any, layout: Layout) -> float:
    """By how much log-probs of a frozen tower change after a pass that only the last rank could not
    prepare, with other owners."""
    tower = made_tower()
    tower.requires_grad_(False)
    frozen = wrapped(tower)
    every = make_samples()
    batch = make_batch(every)
    plan = planned(batch, layout)
    (step,) = plan.steps
    wrong = next(i for mb in step.ranks[-1] for i in mb.samples if every[i].refs)
    images = [sample.refs for sample in every]
    images[wrong] = [dataclasses.replace(r, offset=r.offset - 1) for r in images[wrong]]
    shifted = SampleBatch([sample.ids for sample in every], images=images)
    world = layout.world_size
    others = tuple(one._replace(owner=(one.owner or 0) ^ (world - 1)) for one in step.images)
    turned = dataclasses.replace(plan, steps=(dataclasses.replace(step, images=others),))
    adapter = ScheduleAdapter([chunk], layout=layout, vision=frozen)
    assert refused(lambda: adapter.forward(plan, shifted))
    found = torch.cat(adapter.forward(turned, batch)["logprobs"])
    true = ScheduleAdapter([chunk], layout=layout, vision=frozen).forward(plan, batch)["logprobs"]
    return float((torch.cat(true) - found).abs().max())


def encoded_once(chunk: Any, layout: Layout) -> list[int]:
    """Images that this rank's frozen tower encodes in two passes of a batch, in one of a few of its
    samples as a batch, which ends the first, and in one of the first again."""
    tower = made_tower()
    tower.requires_grad_(False)
    adapter = ScheduleAdapter([chunk], layout=layout, vision=wrapped(tower))
    ahead = adapter.runner.ahead
    assert ahead is not None
    whole, part = make_samples(), make_samples("few")
    counts = []
    for samples in (whole, whole, part, whole):
        batch = make_batch(samples)
        adapter.forward(planned(batch, layout), batch)
        counts.append(len(ahead.encoded_patches))
    return counts


class _Untouched(TorchFunctionMode):
    """Refuses operations on parameters, which end in a deadlock on threads beside a forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, torch.nn.Parameter) for one in args):
            assert func.__name__ == "__get__", func
        return func(*args, **(kwargs or {}))


def prepared_untouched(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch) -> None:
    """Prepare a step's images and make their pixels, as threads do."""
    ahead = adapter.runner.ahead
    assert ahead is not None
    with _Untouched():
        images = ahead.prepare(plan.steps[0], batch)
        for ref in images.refs:
            ahead._pixels(ref)


def rows_refused(adapter: ScheduleAdapter, batch: SampleBatch) -> str:
    images = [batch.images(i) for i in range(len(batch))]
    options = {"layout": adapter.layout, "max_tokens_per_gpu": 96, "images": images}
    plan = build_dp_schedule(batch.lengths, policy=Policy(images="row"), **options)
    return refused(lambda: adapter.forward(plan, batch))


def refused_towers(chunk: Any, layout: Layout) -> dict[str, str]:
    def error_of(tower: Any) -> str:
        return refused(lambda: ScheduleAdapter([chunk], layout=layout, vision=tower))

    frozen = made_tower()
    frozen.requires_grad_(False)
    other = wrapped(frozen)
    adapter = ScheduleAdapter([chunk], layout=layout, vision=other)
    frozen.requires_grad_(True)
    batch = make_batch(make_samples())
    plan = planned(batch, layout)
    others = {}
    for name, sections in {"pairs": (3, 2, 2), "far": (2, 3, 3)}.items():
        others[name] = made_tower()
        others[name].mrope = Mrope(sections, is_interleaved=True)
    lone = made_tower()
    groups = copy.copy(lone.groups)
    for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
        setattr(groups, name, groups.tp)
    overlapping = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    return {
        **{name: error_of(wrapped(tower)) for name, tower in others.items()},
        "thawed": refused(lambda: adapter.step(plan, batch, objective=SFT())),
        "groups": error_of(wrapped(lone, groups)),
        "gather": error_of(wrapped(made_tower(), **overlapping, overlap_param_gather=True)),
    }


def retried(adapter: ScheduleAdapter, plan: Any) -> tuple[str, bool]:
    """What a call says of pixels that cannot be read, and whether it runs once they can."""
    is_there = []

    def later(ref: ImageRef) -> Tensor:
        if not is_there:
            raise OSError("no such disk")
        assert ref.pixels is not None
        return ref.pixels()

    every = make_samples()
    images = [
        [dataclasses.replace(ref, pixels=functools.partial(later, ref)) for ref in sample.refs]
        for sample in every
    ]
    batch = SampleBatch([sample.ids for sample in every], images=images)
    message = refused(lambda: adapter.forward(plan, batch))
    assert refused(lambda: adapter.forward(plan, batch)) == message
    is_there.append(True)
    return message, bool(adapter.forward(plan, batch))


def main(ranks: str, mode: str = "") -> None:
    """Print the tower's gradient norm, and what refused calls say."""
    launch.start("cpu")
    if mode:
        found = without_ddp(int(ranks))
        if dist.get_rank() == 0:
            print("FOUND", json.dumps(found), flush=True)
        launch.stop()
        return
    layout = Layout(dp=int(ranks))
    parallel_state.initialize_model_parallel()
    tower = made_tower()
    config, model = made_decoder()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunk = DistributedDataParallel(config, ddp, model)
    batch = make_batch(make_samples())
    plan = planned(batch, layout)
    messages = {
        "no tower": refused(
            lambda: ScheduleAdapter([chunk], layout=layout).step(plan, batch, objective=SFT())
        ),
        "no DDP": refused(lambda: ScheduleAdapter([chunk], layout=layout, vision=tower)),
        "not a tower": refused(
            lambda: ScheduleAdapter([chunk], layout=layout, vision=torch.nn.Linear(1, 1))
        ),
    }
    adapter = ScheduleAdapter([chunk], layout=layout, vision=wrapped(tower))
    result = adapter.step(plan, batch, objective=SFT())
    norm = norm_of([param.main_grad for param in tower.parameters()])

    def changed(**values: Any) -> SampleBatch:
        images = [[dataclasses.replace(r, **values) for r in s.refs] for s in make_samples()]
        every = make_samples()
        return SampleBatch([s.ids for s in every], images=images)

    for name, wrong in {
        "pixels": changed(pixels=lambda: torch.zeros(3, 96)),
        "array": changed(pixels=lambda: [[0.0]]),
        "no pixels": changed(pixels=None),
    }.items():
        messages[name] = refused(lambda wrong=wrong: adapter.forward(plan, wrong))
    every = make_samples()
    tensors = {"other": TensorField([[1.0]] * len(every))}
    both = SampleBatch([s.ids for s in every], tensors=tensors, images=[s.refs for s in every])
    early = [[dataclasses.replace(r, offset=r.offset - 1) for r in s.refs] for s in every]
    shifted = SampleBatch([s.ids for s in every], images=early)
    messages["offset"] = refused(lambda: adapter.forward(plan, shifted))
    messages["disk"], is_retried = retried(adapter, plan)
    lone = made_tower()
    lone.requires_grad_(False)
    frozen = ScheduleAdapter([chunk], layout=layout, vision=wrapped(lone))
    is_retried &= retried(frozen, plan)[1]
    messages["tensors"] = refused(lambda: adapter.forward(plan, both))
    _, turned = made_decoder(rotary_interleaved=True)
    lone = made_tower()
    messages["turned"] = refused(lambda: ScheduleAdapter([turned], layout=layout, vision=lone))
    _, other = made_decoder(mtp_num_layers=None)
    other.config.mtp_num_layers = 1
    messages["mtp"] = refused(lambda: ScheduleAdapter([other], layout=layout, vision=lone))
    _, lettered = made_decoder()
    lettered.hybrid_layer_pattern = "*-"
    messages["letters"] = refused(lambda: ScheduleAdapter([lettered], layout=layout, vision=lone))
    messages |= refused_towers(chunk, layout)
    messages["rows"] = rows_refused(adapter, batch)
    prepared_untouched(adapter, plan, batch)
    once = encoded_once(chunk, layout)
    kept = kept_features(chunk, layout)
    failed = after_a_rank_failed(chunk, layout)
    half = in_dtype(made_tower().visual, torch.bfloat16)
    if dist.get_rank() == 0:
        types = [next(half.parameters()).dtype, half.rotary_pos_emb.inv_freq.dtype]
        found = {"norm": norm, "loss": result.loss, "messages": messages, "types": str(types)}
        found |= {"kept": kept, "retried": is_retried, "failed": failed, "once": once}
        print("FOUND", json.dumps(found), flush=True)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
