"""What jobs that measure have in common: the model, its samples, and the file that tells the ranks.

    path = write_task(session, "dp4", end, layout=layout.to_payload())
    session.job("dp4", MODULE, path, out)       # the ranks call `read_task` and `read_config`

The model is Qwen3-1.7B with random weights; in a rehearsal it is tiny, and so are the rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megapack.config import load_config
from megapack.job.config.sections import TrainConfig
from tools.bench_gpu import TINY
from tools.benching.gpu_model import pick, trace_lengths
from tools.benching.gpu_ways import Sample
from tools.benching.hf_configs import write_hf_configs
from tools.nccl.launch import ROOT
from tools.nccl.session import Session

CONFIG = ROOT / "configs" / "qwen3_1p7b_gpu1.yaml"
NAME = "Qwen3-1.7B"
# Tokens of a row and of the longest sample, which a GPU of 80 GB can hold alone in a row beside
# both copies of the weights of a race, and a pipeline of two stages and chunks in two pieces.
_ROW_TOKENS, _LONGEST = 8192, 16384
_TINY_ROW_TOKENS, _TINY_LONGEST = 256, 512
_TINY_LAYERS = 4
"""A layer per chunk of two stages with two chunks each."""
# Long answers, some longer than a row: so rows over several ranks and pieces have their use.
_TRACE = "skythought_aime24_longcot_g16.csv"


def settings(session: Session) -> list[str]:
    """Overrides of `CONFIG`: the model's sizes, and rows of this check."""
    layers = {"num_hidden_layers": _TINY_LAYERS, "max_window_layers": _TINY_LAYERS}
    folder = write_hf_configs(
        session.out / "ranks", **({**TINY, **layers} if session.rehearsed else {})
    )
    budget, longest = _ROW_TOKENS, _LONGEST
    if session.rehearsed:
        budget, longest = _TINY_ROW_TOKENS, _TINY_LONGEST
    return [
        *(f"model.hf_path={folder / 'models' / NAME}", f"data.max_length={longest}"),
        *(f"plan.max_tokens_per_gpu={budget}", "plan.forward_max_tokens_per_gpu=null"),
    ]


def read_config(overrides: list[str]) -> TrainConfig:
    """The model's config."""
    return load_config(CONFIG, overrides, TrainConfig)


def trace() -> Path | None:
    """The length trace, where TRACES (`tools/gpu_check.sh`) or its default has it."""
    path = Path(os.environ.get("TRACES") or ROOT.parent / "shared" / "traces") / _TRACE
    return path if path.exists() else None


def samples(config: TrainConfig, tokens: int) -> list[Sample]:
    """Samples with at least so many tokens, of the trace or generated; shorter in a rehearsal."""
    longest = config.data.max_length
    assert longest is not None
    shorter = _LONGEST // longest
    found = [(p // shorter, max(1, r // shorter)) for p, r in trace_lengths(trace())]
    return pick(found, tokens, longest)


def write_task(session: Session, name: str, end: float, **more: Any) -> Path:
    """The file of a job.

    Args:
        end: when the ranks end by themselves, by `time.monotonic`, which is one clock for all
            processes of a machine.
    """
    path = session.out / "ranks" / f"{session.part}_{name}.json"
    path.write_text(json.dumps({"end": end, **more}), encoding="utf-8")
    return path


def read_task(path: str) -> dict[str, Any]:
    """What `write_task` wrote."""
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def read_results(path: Path) -> dict[str, Any]:
    """What rank 0 has written so far; empty without a file."""
    return read_task(str(path)) if path.exists() else {}
