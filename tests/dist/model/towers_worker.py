"""Builds a toy's decoder and tower, takes two optimizer steps with drawn gradients; each rank
writes how far it is from plain torch.

torchrun --nproc-per-node 2 -m tests.dist.model.towers_worker OUT_DIR FOLDER CASE...
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt import build_model, build_vision, initialize_parallel
from megapack.job.gpt.init import full_shape, local_slice
from megapack.job.gpt.optimizer import build_lr_schedule, build_optimizer
from megapack.model.overlap import finish_param_gathers
from megapack.model.parameters import global_parameters
from tests.dist.setup import error_of, report_cases

STEPS = 2
DECODER = ("embedding.*", "decoder.*", "output_layer.*")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of two ranks, and what of the model is trained."""

    layout: Layout
    distributed: bool = True
    vision: str = "train"
    freeze: tuple[str, ...] = ()
    dtype: str = "fp32"


CASES = {
    "dp2": Case(layout=Layout(dp=2)),
    "dp2_whole": Case(layout=Layout(dp=2), distributed=False),
    "tp2": Case(layout=Layout(tp=2, sequence_parallel=True)),
    "pp2": Case(layout=Layout(pp=2)),
    "pp2_whole": Case(layout=Layout(pp=2), distributed=False),
    "pp2_bf16": Case(layout=Layout(pp=2), dtype="bf16"),
    "frozen": Case(layout=Layout(pp=2), vision="frozen"),
    "tower_only": Case(layout=Layout(pp=2), freeze=DECODER),
    "mergers_only": Case(
        layout=Layout(tp=2, sequence_parallel=True),
        freeze=(*DECODER, "visual.blocks.*", "visual.patch_embed.*", "visual.pos_embed.*"),
    ),
}


def drawn(name: str, shape: Any, key: object) -> Tensor:
    """Numbers by name, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    return torch.randn(tuple(shape), generator=generator)


class Job:
    """A model on a layout, beside the same weights in plain torch."""

    def __init__(self, folder: str, case: Case) -> None:
        self.case = case
        initialize_parallel(case.layout, 1)
        model = ModelConfig.from_hf(
            folder, vision=case.vision, freeze=case.freeze, dtype=case.dtype
        )
        assert model.vocab_size is not None
        self.chunks = build_model(
            model,
            case.layout,
            vocab_size=model.vocab_size,
            seed=1,
            distributed_optimizer=case.distributed,
        )
        self.tower = build_vision(model, distributed_optimizer=case.distributed)
        for name, param in self.tower.module.named_parameters():
            param.data.copy_(drawn(name, param.shape, "weight"))
        self.optim = OptimConfig(
            lr=1e-2, weight_decay=0.1, clip_grad=0.7, distributed_optimizer=case.distributed
        )
        bf16 = case.dtype == "bf16"
        self.optimizer = build_optimizer(self.optim, self.chunks, bf16, vision=self.tower)
        self.schedule = build_lr_schedule(self.optim, self.optimizer, STEPS)
        self.plain = {
            name: torch.nn.Parameter(param.detach().float().clone())
            for name, param, _ in self.params()
        }

    def params(self) -> Iterator[tuple[str, Any, bool]]:
        """This rank's trained parameters, and whether each is the tower's."""
        named = [(*pair, False) for chunk in self.chunks for pair in global_parameters(chunk)]
        named += [(*pair, True) for pair in self.tower.module.named_parameters()]
        return ((name, param, own) for name, param, own in named if param.requires_grad)

    def step(self, step: int) -> tuple[float, float]:
        """A step here and in plain torch; returns both gradient norms."""
        for module in (*self.chunks, self.tower):
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        tp, squares = self.case.layout.tp, {}
        for name, param, is_tower in self.params():
            if is_tower:
                # Each rank has had its own images.
                param.main_grad.copy_(drawn(name, param.shape, (step, dist.get_rank())))
                ranks = range(dist.get_world_size())
                whole = torch.stack([drawn(name, param.shape, (step, one)) for one in ranks]).sum(0)
            else:
                whole = drawn(name, full_shape(param, tp), step)
                param.main_grad.copy_(local_slice(whole, param, dist.get_rank() % tp, tp))
            self.plain[name].grad = local_slice(whole, param, dist.get_rank() % tp, tp).clone()
            squares[name] = float(whole.double().square().sum())
        self.tower.finish_grad_sync()
        done, norm, _ = self.optimizer.step()
        finish_param_gathers([*self.chunks, self.tower])
        assert done
        every: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, squares)
        expected = sum(functools.reduce(lambda a, b: a | b, every).values()) ** 0.5
        self.plain_step(min(1.0, self.optim.clip_grad / (expected + 1e-6)))
        self.schedule.step(1)
        return float(norm), expected

    def plain_step(self, clip: float) -> None:
        """A step of torch's AdamW; vectors do not decay."""
        rates = {group["lr"] for group in self.optimizer.param_groups}
        assert len(rates) == 1, rates
        if not hasattr(self, "adam"):
            values = list(self.plain.values())
            groups = [
                {"params": [value for value in values if value.dim() > 1]},
                {"params": [value for value in values if value.dim() == 1], "weight_decay": 0.0},
            ]
            betas = (self.optim.adam_beta1, self.optim.adam_beta2)
            decay = self.optim.weight_decay
            self.adam = torch.optim.AdamW(
                groups, betas=betas, eps=self.optim.adam_eps, weight_decay=decay
            )
        for group in self.adam.param_groups:
            group["lr"] = rates.copy().pop()
        for value in self.plain.values():
            assert value.grad is not None
            value.grad *= clip
        self.adam.step()

    def error(self) -> float:
        """The largest error of a weight, relative to those above 1."""
        errors = []
        for name, param, _ in self.params():
            plain = self.plain[name].detach()
            errors.append((param.detach().float() - plain).abs() / plain.abs().clamp(min=1))
        return max(float(error.max()) for error in errors)


def run(folder: str, name: str) -> dict[str, Any]:
    """Two steps of a case."""
    case = CASES[name]
    job = Job(folder, case)
    before = {name: value.clone() for name, value in job.tower.module.state_dict().items()}
    norms = [job.step(step) for step in range(STEPS)]
    after = job.tower.module.state_dict()
    rotary = job.tower.module.visual.rotary_pos_emb.inv_freq
    width = len(rotary)
    return {
        "trained": [name for name, _, _ in job.params()],
        "changed": [name for name in after if not torch.equal(before[name], after[name])],
        "norms": norms,
        "error": job.error(),
        "same": same_on_all(after),
        "rotary": torch.equal(rotary, 1 / 1e4 ** (torch.arange(width) / width)),
        "dtypes": sorted({str(value.dtype) for value in after.values()}),
    }


def same_on_all(state: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    digests: list[int] = [0] * dist.get_world_size()
    flat = torch.cat([value.float().flatten() for value in state.values()])
    dist.all_gather_object(digests, zlib.crc32(flat.numpy().tobytes()))
    return len(set(digests)) == 1


def run_unmatched(folder: str) -> str:
    """The error of a glob that matches nothing of the tower."""
    initialize_parallel(Layout(dp=2), 1)
    model = ModelConfig.from_hf(folder, vision="train", freeze=("visual.mergers.*",))
    return error_of(lambda: build_vision(model, distributed_optimizer=False) and None)


def main(out_dir: str, folder: str, *names: str) -> None:
    """Run the cases."""
    report_cases(
        out_dir,
        lambda name: run_unmatched(folder) if name == "unmatched" else run(folder, name),
        names,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
