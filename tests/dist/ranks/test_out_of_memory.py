"""A rank that runs out of memory ends the job on every rank: the error says what to set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist.ranks.rank_fault_worker import LAYER
from tests.dist.ranks.rank_faults import SHARED, Case, run_case

pytestmark = pytest.mark.dist

# Two layers per chunk: a rank may run out of memory between them.
WIDE = (SHARED, "model.num_layers=8")
CRITIC = ("critic.enabled=true", "objective.kind=ppo", "objective.advantage_norm=group")


@pytest.mark.parametrize(
    ("phase", "rank", "settings"),
    [
        ("forward", 0, ()),
        (LAYER, 1, WIDE),
        *(
            pytest.param(*case, marks=pytest.mark.weekly)
            for case in (
                ("loss", 3, ()),
                ("backward", 2, ("train.executor=operations",)),
                ("backward", 3, (*WIDE, "model.recompute=full")),
                ("log-probs", 1, ()),
                ("critic", 1, CRITIC),
            )
        ),
    ],
)
def test_every_rank_names_the_rank_its_rows_and_what_to_set(
    phase: str, rank: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    assert run_case(Case("out_of_memory", phase, rank), tmp_path, *settings).complaints == ()
    error = json.loads((tmp_path / "rank0.json").read_text())["error"]
    assert re.search(
        r"StepOutOfMemory: CUDA out of memory\. Tried to allocate 2\.00 GiB; the step's rows have "
        r"up to \d+ tokens on this GPU, micro-batch \d \(samples [\d, .]+\) has \d+; set a lower "
        r"max_tokens_per_gpu or micro_batch_size, model\.recompute=full, or a layout with more",
        error,
    )
