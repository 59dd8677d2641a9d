"""Measure the time and the host memory per rank of saving and loading a checkpoint, over gloo.

    python tools/bench_checkpoint.py [--hidden 1024] [--layers 12] [--dp 4] [--threads 4] [--async]
    python tools/bench_checkpoint.py --gather ...   # first, Megatron's format that gathers

The model is a GPT with Adam's state in the distributed optimizer. Each rank prints the bytes that
it holds, and by how much saving and loading raise the peak of its resident memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout, launch
from megapack.job.checkpoint.state import RunState
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.build import build_model, initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer

ROOT = Path(__file__).resolve().parents[1]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of `work`, and MiB by which it raises this process's peak of resident memory."""
    dist.barrier()
    # 5 sets the peak back to the present value.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return seconds, _resident("VmHWM") - before


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    device = launch.start("cpu")
    layout = Layout(dp=args.dp)
    initialize_parallel(layout, 1)
    config = ModelConfig(
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_query_groups=args.hidden // 64,
        dtype="bf16",
    )
    chunks = build_model(config, layout, vocab_size=4096, seed=1, distributed_optimizer=True)
    optimizer = build_optimizer(OptimConfig(distributed_optimizer=True), chunks, bf16=True)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    state = RunState(chunks, optimizer)
    if args.gather:
        gather_s, gather_mib = measured(lambda: _gather(state, optimizer))
        print(
            f"rank {dist.get_rank()}: the gather took {gather_s:.1f} s and {gather_mib:.0f} MiB",
            flush=True,
        )
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        shared = [name]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        save_s, save_mib = measured(lambda: _save(state, folder, args, device))
        written = sum(path.stat().st_size for path in folder.glob(f"__{dist.get_rank()}_*"))
        load_s, load_mib = measured(
            lambda: state.load(folder, num_updates=1, with_reference=False, device=device)
        )
        dist.barrier()
    num_params = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    own = num_params * 12 / args.dp / 2**20
    print(
        f"rank {dist.get_rank()}: {num_params / 1e6:.0f} M parameters, {own:.0f} MiB of optimizer "
        f"state; wrote {written / 2**20:.0f} MiB in {save_s:.1f} s with {save_mib:.0f} MiB more "
        f"memory, loaded in {load_s:.1f} s with {load_mib:.0f} MiB more",
        flush=True,
    )
    launch.stop()
    return 0


def _save(state: RunState, folder: Path, args: argparse.Namespace, device: torch.device) -> None:
    writer = state.writer(folder, num_threads=args.threads, device=device)
    if args.is_async:
        writer.stage()
    writer.plan()
    writer.write()
    writer.finish()


def _gather(state: RunState, optimizer: Any) -> None:
    """What Megatron's `fully_reshardable` format does before anything is written."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": True}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.sharded_state_dict(state._model(), metadata=metadata)


def launch_ranks(argv: Sequence[str]) -> int:
    """Start this script once per rank."""
    args = parser().parse_args(argv)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(args.dp)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, __file__, *argv], env=env, check=False).returncode


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    found.add_argument("--hidden", type=int, default=1024, help="hidden size, a multiple of 64")
    found.add_argument("--layers", type=int, default=12)
    found.add_argument("--dp", type=int, default=4, help="ranks")
    found.add_argument("--threads", type=int, default=4, help="writer threads per rank")
    found.add_argument("--async", dest="is_async", action="store_true", help="copy before writing")
    found.add_argument("--gather", action="store_true", help="measure Megatron's gather too")
    found.add_argument("--dir", help="of the checkpoint; by default the system's")
    return found


if __name__ == "__main__":
    sys.exit(main() if "RANK" in os.environ else launch_ranks(sys.argv[1:]))
