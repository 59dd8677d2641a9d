"""What workers share: the problem's model on a layout, the error of an attempt, the report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megapack import Layout, MegapackError, launch
from megapack.cost import LayerSplit
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.job.gpt.settings import Settings
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.streams import streams_of
from tests.te_python import runs_te


def build_chunks(
    layout: Layout,
    *,
    model: ModelConfig = problem.MODEL,
    distributed_optimizer: bool = False,
    split: LayerSplit | None = None,
    value_head: bool = False,
    reduction: Settings | None = None,
    splits_backward: bool = False,
    before_wrapping: Callable[[list[Any]], object] | None = None,
) -> list[DistributedDataParallel]:
    """Make Megatron's groups for a layout, and this rank's chunks."""
    model = on_kernels_of_job(model)
    initialize_parallel(layout, problem.SEED)
    stage_layers = (split or LayerSplit()).stage_layers(
        model.num_layers, pp=layout.pp, vpp=layout.vpp, num_mtp_layers=model.mtp_num_layers
    )
    with streams_of(model):
        chunks = build_model(
            model,
            layout,
            vocab_size=problem.VOCAB_SIZE,
            seed=problem.SEED,
            distributed_optimizer=distributed_optimizer,
            stage_layers=stage_layers,
            value_head=value_head,
            reduction=reduction,
            splits_backward=splits_backward,
            before_wrapping=before_wrapping,
        )
    for chunk in chunks:
        problem.slow_decays(chunk)
    return chunks


def on_kernels_of_job(model: ModelConfig) -> ModelConfig:
    """The model, on Transformer Engine's layers in a job that has them, if it leaves the choice.

    "auto" would be SDPA there, since the device is no GPU.
    """
    if runs_te() and model.attention == "auto":
        return dataclasses.replace(model, attention="te")
    return model


def error_of(attempt: Callable[[], None]) -> str:
    """Class and message of the error that the attempt raises; "" without an error."""
    try:
        attempt()
    except MegapackError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write_report(out_dir: str, found: Any) -> None:
    """Write what this rank found into `OUT_DIR/rank<r>.json`, which `spawn.rank_reports` reads."""
    path = Path(out_dir) / f"rank{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


def report_cases(out_dir: str, run: Callable[[str], Any], names: Iterable[str]) -> None:
    """The job of a worker: run the cases one after the other, and write what this rank found."""
    launch.start("cpu")
    found = {}
    for name in names:
        found[name] = run(name)
        end_model_parallel()
    write_report(out_dir, found)
    launch.stop()
