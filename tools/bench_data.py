"""Measure the time from launch to the first step on a large data file, and each rank's memory.

    python tools/bench_data.py [--rows 1000000] [--ranks 2] [--folder /tmp/megapack_bench_data]
    python tools/bench_data.py --chats [--rows 1000000] [--tokenizer FOLDER]
    python tools/bench_data.py --forms [--rows 100000]

The main job runs twice: the first run tokenizes the file and stores the samples, the second one
loads them. With --chats, no job runs: a file of chats is tokenized by one process and by two, with
a tokenizer that is trained on the spot, or that of a model's folder. With --forms, one process
reads rows of several forms, together and one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
NUM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megapack_bench_data"))
    parser.add_argument("--chats", action="store_true", help="measure tokenization alone")
    parser.add_argument("--forms", action="store_true", help="measure rows of several forms")
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face folder; one with a template")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.chats:
        tokenize_chats(args.folder, args.rows, args.tokenizer)
        return
    if args.forms:
        read_forms(args.folder, args.rows)
        return
    path = args.folder / f"{args.rows}.jsonl"
    if not path.exists():
        write_rows(path, args.rows)
    for index in args.folder.glob(f".{path.name}.*.npy"):
        index.unlink()
    print(f"{args.rows} rows, {path.stat().st_size / 2**20:.0f} MiB")
    for name in ("first run", "second run"):
        seconds, cpu_s, peaks = run(path, args.ranks, args.folder)
        ranks = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(
            f"{name}: first step after {seconds:.1f} s ({cpu_s:.1f} s of CPU on the busiest rank); "
            f"peak MiB per rank: {ranks}",
            flush=True,
        )


def write_rows(path: Path, num_rows: int) -> None:
    """Write short prompts with four answers each."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for row in range(num_rows):
            sample = {
                "group": row // 4,
                "rollout": row % 4,
                "prompt": f"Add {row // 4} and {rng.randrange(100)}.",
                "response": "x" * rng.randrange(1, 40),
                "reward": rng.random(),
            }
            file.write(json.dumps(sample) + "\n")


def read_forms(folder: Path, num_rows: int) -> None:
    """Print the CPU seconds from rows to the index, read together and one by one."""
    from megapack.job.data import blocks
    from megapack.job.data.dataset import Dataset
    from megapack.job.data.token_blocks import ReadSettings

    read_columns = blocks.read_columns
    for path in write_forms(folder, num_rows):
        found = []
        for read in (read_columns, lambda *_: None):
            blocks.read_columns = read
            for stored in folder.glob(f".{path.name}.*.npy"):
                stored.unlink()
            started = time.process_time()
            Dataset.from_files(path, ReadSettings(), folder, num_workers=1)
            found.append(time.process_time() - started)
        print(
            f"{path.name}: {num_rows} rows of {path.stat().st_size / num_rows:.0f} bytes, "
            f"{found[0]:.2f} s of CPU together, {found[1]:.2f} s one by one",
            flush=True,
        )


def write_forms(folder: Path, num_rows: int) -> list[Path]:
    """Write text, text with an unusual row per thousand, ids, ids with masks; text as Parquet."""
    import pyarrow
    from pyarrow import parquet

    text = folder / f"text_{num_rows}.jsonl"
    write_rows(text, num_rows)
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "text.parquet")
    rng = random.Random(0)
    ids = [
        {
            "group": row["group"],
            "prompt_ids": rng.choices(range(259), k=30),
            "response_ids": rng.choices(range(259), k=100),
            "reward": row["reward"],
        }
        for row in rows
    ]
    mask = {"response_mask": [0] * 20 + [1] * 80}
    uneven = [{**row, "reward": None} if i % 1000 == 0 else row for i, row in enumerate(rows)]
    forms = {"uneven": uneven, "ids": ids, "masks": [{**row, **mask} for row in ids]}
    for name, lines in forms.items():
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(content)
    return [text, *(folder / f"{name}.jsonl" for name in forms), folder / "text.parquet"]


def tokenize_chats(folder: Path, num_rows: int, tokenizer_folder: Path | None) -> None:
    """Print the rows per second of one process and of two."""
    from megapack.job.data.dataset import Dataset
    from megapack.job.data.hf_tokenizer import HfTokenizer
    from megapack.job.data.token_blocks import ReadSettings

    path = folder / f"chats_{num_rows}.jsonl"
    if not path.exists():
        write_chats(path, num_rows)
    settings = ReadSettings(tokenizer=HfTokenizer(tokenizer_folder or make_tokenizer(folder)))
    rates = []
    for num_workers in (1, 2):
        for stored in folder.glob(f".{path.name}.*.npy"):
            stored.unlink()
        before = sum(os.times()[:4])
        started = time.monotonic()
        data = Dataset.from_files(path, settings, folder, num_workers)
        rates.append(num_rows / (time.monotonic() - started))
        # Of this process and those that it started.
        cpu_rate = num_rows / (sum(os.times()[:4]) - before)
        numbers = np.arange(len(data))
        num_tokens = sum(data.prompt_tokens(numbers)) + sum(data.response_tokens(numbers))
        print(
            f"{num_workers} process(es): {rates[-1]:.0f} rows/s, {cpu_rate:.0f} per second of CPU; "
            f"{num_rows} chats of {path.stat().st_size / num_rows:.0f} bytes and "
            f"{num_tokens / num_rows:.0f} tokens",
            flush=True,
        )
    print(f"two processes are {rates[1] / rates[0]:.2f} times as fast as one")


def write_chats(path: Path, num_rows: int) -> None:
    """Write chats of a system message, and two turns of a user and an assistant each."""
    rng = random.Random(0)
    words = ("add", "the", "number", "and", "then", "answer", "with", "a", "short", "sentence")

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length))

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(num_rows):
            messages = [{"role": "system", "content": "You are a helpful assistant."}]
            for _ in range(2):
                messages.append({"role": "user", "content": text(rng.randrange(5, 40))})
                messages.append({"role": "assistant", "content": text(rng.randrange(5, 60))})
            file.write(json.dumps({"messages": messages}) + "\n")


def make_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer with a ChatML template without generation marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "add the number and then answer with a short sentence; you are a helpful assistant"
    bpe.train_from_iterator([text] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{%- for one in messages %}"
        "{{- '<|im_start|>' + one.role + '\\n' + one.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def run(path: Path, ranks: int, folder: Path) -> tuple[float, float, list[float]]:
    """Run the main job for `NUM_STEPS` batches.

    Returns:
        Seconds until the first line of metrics; CPU seconds of the busiest rank until then; peak
        resident MiB of each rank.
    """
    settings = [f"data.path={path}", f"layout.dp={ranks}", "layout.pp=1", "layout.vpp=1"]
    settings += ["name=bench", f"runs_dir={folder}/runs", f"train.num_batches={NUM_STEPS}"]
    settings += ["data.shuffle=true", "plan.global_batch_size=128"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", str(ranks), "-m", "megapack", "train", str(CONFIG)]
    metrics = folder / "runs/bench/metrics.jsonl"
    metrics.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, "-W", "ignore", *launch, *settings],
        env=env,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    peaks: dict[int, float] = {}
    first_step: float | None = None
    cpu_s = 0.0
    try:
        while job.poll() is None:
            if first_step is None and metrics.exists() and metrics.stat().st_size:
                first_step = time.monotonic() - started
                cpu_s = max((_cpu_s(pid) for pid in _children(job.pid)), default=0.0)
            for pid in _children(job.pid):
                peaks[pid] = max(peaks.get(pid, 0.0), _peak_mib(pid))
            time.sleep(0.05)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode or first_step is None:
        raise SystemExit(f"the job failed with exit code {job.returncode}")
    return first_step, cpu_s, list(peaks.values())


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _cpu_s(pid: int) -> float:
    # Fields 14 and 15 of the file: user and system time in clock ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max((int(line.split()[1]) / 1024 for line in lines if line[:6] == "VmHWM:"), default=0)


if __name__ == "__main__":
    main()
