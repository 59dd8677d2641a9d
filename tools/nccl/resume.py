"""The main job, saved while it trains, and resumed on another layout from the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megapack import Layout
from tools.nccl.found import Found
from tools.nccl.launch import ROOT
from tools.nccl.layouts import busy_layout, layout_name
from tools.nccl.session import Session

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = [
    *("name=run", "device=cuda", "model.attention=sdpa", "data.num_generated=32"),
    *("data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("train.save_interval=1", "train.keep_checkpoints=null", "train.async_save=true"),
    "optim.adam_eps=1e-2",
]
# Relative, of the loss and of the gradient norm, in fp32. The sums of layouts differ in order.
LIMIT = 1e-4


def run(session: Session) -> Found:
    """Train on one layout, and again on another from the checkpoint of the second step on."""
    folder = session.folder("job_files")
    first = busy_layout(session.ranks)
    second = Layout(tp=2, sequence_parallel=True, dp=session.ranks // 2)
    found = Found()
    whole = _train(session, found, "whole", folder / "whole", first)
    middle = folder / "whole" / "run" / "checkpoints" / "step-00000002"
    resumed = _train(session, found, "resumed", folder / "more", second, f"train.resume={middle}")
    if found.failures:
        return found
    wanted = [line for line in whole if line["step"] > 2]
    if not wanted or [line["step"] for line in wanted] != [line["step"] for line in resumed]:
        found.failures.append(f"{len(resumed)} resumed steps of {len(whole)}")
        return found
    errors = {
        name: max(
            abs(line[name] - expected[name]) / max(abs(expected[name]), 0.1)
            for line, expected in zip(resumed, wanted, strict=True)
        )
        for name in ("loss", "grad_norm")
    }
    found.figures = errors
    found.failures = [f"{name} differs by {e:.1e}" for name, e in errors.items() if not e <= LIMIT]
    found.line = (
        f"{len(resumed)} of {len(whole)} steps on {layout_name(second)} instead of "
        f"{layout_name(first)}: loss differs by {errors['loss']:.1e}, gradient norm by "
        f"{errors['grad_norm']:.1e}"
    )
    return found


def _train(
    session: Session, found: Found, name: str, folder: Path, layout: Layout, *more: str
) -> list[dict[str, Any]]:
    """The metrics of a job's steps on this layout; [] after a failure."""
    if found.failures:
        return []
    folder.mkdir(exist_ok=True)
    sizes = [f"layout.{size}={getattr(layout, size)}" for size in ("dp", "tp", "pp", "vpp")]
    sizes.append(f"layout.sequence_parallel={str(layout.sequence_parallel).lower()}")
    command = ["train", CONFIG, *SETTINGS, *sizes, f"runs_dir={folder}", *more]
    ended = session.job(name, "megapack", *command).ended
    if not ended.is_good:
        found.failures.append(f"{name}: {ended.reason}")
        return []
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
