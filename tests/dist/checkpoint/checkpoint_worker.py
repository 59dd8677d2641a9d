"""Saves and loads checkpoints of a trained model on one layout; each rank writes what it found.

torchrun --nproc-per-node 2 -m tests.dist.checkpoint.checkpoint_worker OUT_DIR TP EP VARIANT DTYPE \
    OPTIMIZER

OPTIMIZER is adam, distributed (Adam) or muon.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch.distributed.checkpoint import filesystem

from megapack import Layout, build_dp_schedule, launch
from megapack.base.choices import Dtype
from megapack.job.checkpoint.state import RunState
from megapack.job.checkpoint.writer import StateWriter
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, write_report

CPU = torch.device("cpu")


class Case:
    """A model that has taken one step, and its optimizer.

    Args:
        tp: tensor parallel ranks; the other ranks are data parallel.
        ep: expert parallel ranks; above 1 the model has experts.
        variant: one of `problem.MODELS`, or "frozen".
        optimizer: "adam", "distributed" or "muon".
    """

    def __init__(self, tp: int, ep: int, variant: str, dtype: Dtype, optimizer: str) -> None:
        layout = Layout(tp=tp, ep=ep, dp=dist.get_world_size() // tp)
        experts = {"num_experts": 4} if ep > 1 else {}
        is_frozen = variant == "frozen"
        model = problem.MODELS["plain" if is_frozen else variant][0]
        model = dataclasses.replace(model, dtype=dtype, **experts)
        if is_frozen:
            model = dataclasses.replace(model, freeze=("embedding.*", "*.mlp.*"))
        distributed = optimizer == "distributed"
        self.chunks = build_chunks(layout, model=model, distributed_optimizer=distributed)
        name: Literal["adam", "muon"] = "muon" if optimizer == "muon" else "adam"
        optim = OptimConfig(name=name, lr=1e-2, distributed_optimizer=distributed)
        self.optimizer = build_optimizer(optim, self.chunks, bf16=dtype == "bf16")
        self.num_fp32 = sum(p.dtype == torch.float32 for p in self._parameters())
        before = [p.detach().clone() for p in self._parameters()]
        batch = problem.make_batch()
        plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        ScheduleAdapter(self.chunks, layout=layout).step(plan, batch, objective=problem.OBJECTIVE)
        self.optimizer.step()
        self.state = RunState(self.chunks, self.optimizer)
        pairs = zip(before, self._parameters(), strict=True)
        self.num_moved = sum(not torch.equal(a, b) for a, b in pairs)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @property
    def optimizers(self) -> list[Any]:
        """Megatron's optimizers in the chain."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def tensors(self) -> list[torch.Tensor]:
        """Weights, main weights and moments of this rank."""
        found = [p.detach() for p in self._parameters()]
        for one in self.optimizers:
            for group in one.optimizer.param_groups:
                for param in group["params"]:
                    state = one.optimizer.state[param]
                    moments = [value for name, value in state.items() if name != "step"]
                    found += [param.detach(), *moments]
        return found

    def save(self, folder: Path, *, staged: bool, changed: Callable[[], None]) -> None:
        """Save; between planning and writing, run `changed`."""
        writer = self.state.writer(folder, num_threads=2, device=CPU)
        if staged:
            writer.stage()
        writer.plan()
        changed()
        writer.write()
        writer.finish()

    def save_ahead(self, folder: Path) -> None:
        """Save with torch's loader for GPUs, which holds 64 bytes and one tensor at a time."""
        writer = self.state.writer(folder, num_threads=2, device=CPU)
        writer._files.per_thread_copy_ahead = 64
        writer.plan()
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            # The loader of CPUs must not run.
            mock.patch.object(filesystem, "_SerialCpuLoader", None),
        ):
            writer.write()
        writer.finish()

    def save_as_megatron(self, folder: Path) -> None:
        """Save in Megatron's `fully_reshardable` format, which gathers the optimizer's state."""
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        metadata |= {"non_homogeneous_layers": True, "chained_optim_avoid_prefix": True}
        model = self.state._model()
        sharded: dict[str, Any] = dict(model)
        for index, one in enumerate(self.optimizers):
            state = one.sharded_state_dict(model, metadata=metadata)["param_state"]
            sharded[f"optimizer{index}"] = state
        tensors, _ = save_preprocess(sharded, validate_access_integrity=False)
        writer = StateWriter(tensors, folder, num_threads=1, device=CPU)
        writer.plan()
        writer.write()
        writer.finish()

    def load(self, folder: Path) -> None:
        self.state.load(folder, num_updates=1, with_reference=False, device=CPU)

    def overwrite(self) -> None:
        """Set every tensor to a wrong value."""
        for tensor in self.tensors():
            tensor.fill_(7.0)

    def loads(self, folder: Path, expected: list[torch.Tensor]) -> bool:
        """Whether loading restores every tensor bit by bit."""
        self.overwrite()
        self.load(folder)
        return all(torch.equal(a, b) for a, b in zip(self.tensors(), expected, strict=True))


def main(out_dir: str, tp: int, ep: int, variant: str, dtype: Dtype, optimizer: str) -> None:
    launch.start("cpu")
    case = Case(tp, ep, variant, dtype, optimizer)
    expected = [tensor.clone() for tensor in case.tensors()]
    folders = {name: Path(out_dir, name) for name in ("direct", "ahead", "staged", "megatron")}
    # Megatron gives fp32 parameters of a bf16 model the state of others.
    if dtype == "bf16" or optimizer != "distributed":
        del folders["megatron"]
    if dist.get_rank() == 0:
        for folder in folders.values():
            folder.mkdir()
    dist.barrier()
    if "megatron" in folders:
        case.save_as_megatron(folders["megatron"])
    case.save(folders["direct"], staged=False, changed=lambda: None)
    case.save_ahead(folders["ahead"])
    # The snapshot is that of `stage`, whatever happens to the weights afterwards.
    case.save(folders["staged"], staged=True, changed=case.overwrite)
    own = f"__{dist.get_rank()}_*"
    found = {
        "loads": {name: case.loads(folder, expected) for name, folder in folders.items()},
        "bytes": sum(path.stat().st_size for path in folders["direct"].glob(own)),
        "files": len(list(folders["direct"].glob(own))),
        "parameters": len(case._parameters()),
        "fp32": case.num_fp32,
        "trained": sum(p.requires_grad for p in case._parameters()),
        "moved": case.num_moved,
    }
    write_report(out_dir, found)
    launch.stop()


if __name__ == "__main__":
    out, tp, ep, variant, dtype, optimizer = sys.argv[1:]
    main(out, int(tp), int(ep), variant, dtype, optimizer)
