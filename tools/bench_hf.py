"""Measure loading a Hugging Face folder and exporting it, on two CPU processes.

    python tools/bench_hf.py                       # a toy, in seconds
    python tools/bench_hf.py --size 4b --dir DIR   # the sizes of Qwen3-4B: 16 GB on the disk

Makes a folder of random bf16 weights in shards, and removes it afterwards. For tp2 and pp2 each
rank prints the bytes of its weights, and the peak of its own memory above what it had before the
model was built: the model included, the pages of the files that are mapped not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack import Layout, launch
from megapack.job.config.model import ModelConfig
from megapack.job.gpt.build import build_model, initialize_parallel
from megapack.job.hf import export_hf, load_hf_weights
from megapack.job.hf.export_plan import Target
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.shards import ShardWriter, file_names, write_index

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"tp2": Layout(tp=2, sequence_parallel=True), "pp2": Layout(pp=2)}
SIZES: dict[str, dict[str, int]] = {
    "toy": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # Qwen3-4B
    "4b": {
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
_SHARD_BYTES = {"toy": 4_000_000, "4b": 5_000_000_000}
_SAMPLE_S = 0.01
_GB = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder and measure each layout in processes of its own."""
    args = parser().parse_args(argv)
    if args.rank_of is not None:
        measure(LAYOUTS[args.rank_of], Path(args.dir))
        return 0
    work = Path(tempfile.mkdtemp(prefix="bench_hf_", dir=args.dir))
    try:
        started = time.perf_counter()
        num_bytes = make_folder(work / "model", args.size)
        print(
            f"{args.size}: {num_bytes / _GB:.2f} GB of random weights, written in "
            f"{time.perf_counter() - started:.1f} s; 2 processes on {os.cpu_count()} cores",
            flush=True,
        )
        for name in LAYOUTS:
            _run_ranks(name, work)
    finally:
        shutil.rmtree(work)
    return 0


def _run_ranks(layout: str, work: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = [str(Path(__file__).resolve()), "--rank-of", layout, "--dir", str(work)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    print(layout, flush=True)
    subprocess.run([*run, *own], env=environment, check=True)
    num_equal, num_tensors = compare(work / "model", work / "out")
    print(f"  {num_equal} of {num_tensors} exported tensors are bitwise equal", flush=True)
    shutil.rmtree(work / "out")


def compare(folder: Path, exported: Path) -> tuple[int, int]:
    """The tensors of two folders that are bitwise equal, and all tensors of the first."""
    first = HfFolder(folder)
    second = HfFolder(exported)
    num_equal = 0
    for name, stored in first.tensors.items():
        other = second.tensors[name].file
        with first.open(stored.file) as mine, second.open(other) as theirs:
            num_equal += torch.equal(mine.get_tensor(name), theirs.get_tensor(name))
    return num_equal, len(first.tensors)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--size", choices=SIZES, default="toy")
    options.add_argument("--dir", help="of the folder that is made (the system's for such files)")
    options.add_argument("--rank-of", choices=LAYOUTS, help=argparse.SUPPRESS)
    return options


def make_folder(folder: Path, size: str) -> int:
    """Write config.json and random weights, tensor by tensor; returns the weights' bytes."""
    folder.mkdir()
    sizes = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[Target]] = [[]]
    for name, shape in _shapes(sizes):
        target = Target(name, shape, torch.bfloat16, 0, ())
        if sum(one.num_bytes for one in shards[-1]) + target.num_bytes > _SHARD_BYTES[size]:
            shards.append([])
        shards[-1].append(target)
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for file, targets in zip(file_names(len(shards)), shards, strict=True):
        writer = ShardWriter(folder / file, targets)
        for target in targets:
            values = torch.empty(target.shape, dtype=torch.bfloat16)
            # Random bits without a sign, up to the exponent of 1: numbers below 2.
            values.view(torch.int16).random_(0, 16384, generator=generator)
            writer.write(target.name, values)
            weight_map[target.name] = file
    num_bytes = sum(target.num_bytes for targets in shards for target in targets)
    write_index(folder, weight_map, num_bytes)
    return num_bytes


def _shapes(sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = sizes["hidden_size"]
    width = sizes["head_dim"]
    queries = sizes["num_attention_heads"] * width
    keys = sizes["num_key_value_heads"] * width
    inner = sizes["intermediate_size"]
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.q_norm.weight", (width,)
        yield f"{prefix}self_attn.k_norm.weight", (width,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def measure(layout: Layout, work: Path) -> None:
    """Load and export on this rank, and print what it took."""
    device = launch.start("cpu")
    initialize_parallel(layout, 1)
    # Frozen parameters have no gradients, whose fp32 would be twice the weights.
    model = ModelConfig.from_hf(str(work / "model"), dtype="bf16", freeze=("*",))
    before = own_memory()
    with peak_memory() as peak:
        chunks: list[Any] = build_model(
            model,
            layout,
            vocab_size=model.vocab_size,
            seed=1,
            distributed_optimizer=False,
            draws_weights=False,
        )
        built_gb = (peak() - before) / _GB
        loaded = load_hf_weights(chunks, work / "model", device=device)
        loaded_gb = (peak() - before) / _GB
    share = sum(param.nbytes for chunk in chunks for param in chunk.parameters())
    with peak_memory() as peak:
        exported = export_hf(chunks, work / "out", like=work / "model", device=device)
        exported_gb = (peak() - before) / _GB
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(
                f"  rank {rank}: share {share / _GB:.2f} GB; load {loaded.seconds:.1f} s, peak "
                f"{loaded_gb:.2f} GB ({built_gb:.2f} to build); export {exported.seconds:.1f} s, "
                f"peak {exported_gb:.2f} GB",
                flush=True,
            )
    parallel_state.destroy_model_parallel()
    launch.stop()


def own_memory() -> int:
    """Bytes of this process in memory that are not pages of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no RssAnon")


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Within the block a thread samples `own_memory` a hundred times per second; gives its peak."""
    largest = own_memory()
    stop = threading.Event()

    def look() -> None:
        nonlocal largest
        while not stop.wait(_SAMPLE_S):
            largest = max(largest, own_memory())

    def peak() -> int:
        return max(largest, own_memory())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
