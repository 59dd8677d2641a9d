"""Tokens per second on one GPU: one sample per micro-batch, padded dense batches, packed rows.

    python tools/bench_gpu.py [--trace FILE.csv ...] [--seconds 400] [--out runs/bench_gpu]
    python tools/bench_gpu.py --rehearse    # tiny models, short rows, two rounds

Single kernels are timed first. Each model runs in its own process, which runs all ways in turn on
the same samples. Writes `gpu_report.json` and `gpu_report.md` to the folder. Both list every
failure with its error; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benching.gpu_report import failures, last_line, markdown
from tools.benching.hf_configs import write_hf_configs
from tools.pages.measured import commit

ROOT = Path(__file__).resolve().parents[1]
# Configs, the models whose sizes they have, and tokens per step: a step of every way in every mode
# takes some 20 s on an H100.
MODELS = [
    ("configs/qwen3_1p7b_gpu1.yaml", "Qwen3-1.7B", 49152),
    ("configs/qwen3_4b_gpu1.yaml", "Qwen3-4B", 24576),
]
# What --rehearse changes: the models' sizes, tokens per step and the configs' settings.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
TINY_TOKENS = 6000
TINY_SETTINGS = [
    "plan.max_tokens_per_gpu=2048",
    "plan.forward_max_tokens_per_gpu=4096",
    "data.max_length=1024",
]
# Share of the time for single kernels, which a process of its own times first.
KERNELS_SHARE = 0.15
# A process is killed if it exceeds its share of the time by this much.
GRACE_S = 30


def packages() -> dict[str, str]:
    """Versions of the packages that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformer_engine", "megatron-core", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def checked_out() -> str:
    """The checked-out commit; the machine may have no git, and the folder no history."""
    try:
        return commit()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_model(
    config: Path, tokens: int, seconds: float, folder: Path, rest: Sequence[str]
) -> dict[str, Any]:
    """The measurements of one model's process, and its error if it failed."""
    out = folder / f"{config.stem}.json"
    arguments = [str(out), f"{seconds:.0f}", str(config), str(tokens), *rest]
    found, error = _run("gpu_model", arguments, out, seconds)
    found = {"model": config.stem, "cells": []} | (found or {})
    return found if error is None else {**found, "error": error}


def run_kernels(seconds: float, folder: Path, rest: Sequence[str]) -> list[dict[str, Any]]:
    """The measurements of single kernels; an error of the whole process is one line of them."""
    out = folder / "gpu_kernels.json"
    found, error = _run("gpu_kernels", [str(out), f"{seconds:.0f}", *rest], out, seconds)
    return (found or []) + ([] if error is None else [{"what": "all", "size": 0, "error": error}])


def _run(
    script: str, arguments: Sequence[str], out: Path, seconds: float
) -> tuple[Any, str | None]:
    """What a script of tools/benching wrote to `out`, None without, and why it failed."""
    out.unlink(missing_ok=True)
    path = ROOT / "tools" / "benching" / f"{script}.py"
    error = None
    try:
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            timeout=seconds + GRACE_S,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        # Show all of its standard error; only its last error line goes into the report.
        sys.stderr.write(done.stderr)
        if done.returncode:
            error = f"exit code {done.returncode}: {last_line(done.stderr)}"
    except subprocess.TimeoutExpired:
        error = f"stopped after {seconds + GRACE_S:.0f} s"
    return (json.loads(out.read_text(encoding="utf-8")) if out.exists() else None), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every model")
    parser.add_argument("--config", type=Path, action="append", help="instead of the two models")
    parser.add_argument("--model", help="only this one of the two, such as Qwen3-4B")
    parser.add_argument("--tokens", type=int, help="per step; default: by model")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="CSV of lengths")
    parser.add_argument("--seconds", type=float, default=400, help="for everything")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="all code in tiny sizes, on a CPU")
    parser.add_argument("--tests", type=Path, help="JSON of the GPU tests, to report with the rest")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench_gpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    # The weights are random; only the models' sizes are needed.
    folders = write_hf_configs(options.out, **(TINY if options.rehearse else {})) / "models"
    models = [
        (ROOT / path, tokens, [f"model.hf_path={folders / name}"])
        for path, name, tokens in MODELS
        if options.model in (None, name)
    ]
    if options.config:
        models = [(path, MODELS[0][2], []) for path in options.config]
    rest = [*options.overrides, f"device={options.device}"]
    if options.rehearse:
        options.tokens = options.tokens or TINY_TOKENS
        rest = [*TINY_SETTINGS, *rest, "--rounds", "2"]
    for trace in options.trace:
        rest += ["--trace", str(trace)]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": checked_out(),
        "packages": packages(),
        "rehearsed": options.rehearse,
        "models": [],
    }
    if options.tests is not None and options.tests.exists():
        report["tests"] = json.loads(options.tests.read_text(encoding="utf-8"))
    if options.device == "cuda":
        small = ["--rehearse"] if options.rehearse else []
        report["kernels"] = run_kernels(KERNELS_SHARE * options.seconds, options.out, small)
    for number, (path, tokens, own) in enumerate(models):
        share = (end - time.monotonic()) / (len(models) - number)
        found = run_model(path, options.tokens or tokens, share, options.out, [*own, *rest])
        report["models"].append(found)
        # Written after each model, so that results survive if the machine is taken away.
        (options.out / "gpu_report.json").write_text(json.dumps(report, indent=1), "utf-8")
        (options.out / "gpu_report.md").write_text(markdown(report), "utf-8")
    print(markdown(report))
    sys.exit(1 if failures(report) else 0)


if __name__ == "__main__":
    main()
