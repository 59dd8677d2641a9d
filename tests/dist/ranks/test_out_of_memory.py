"""A step that runs out of memory is run again, as if its first attempt had not happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks.rank_fault_worker import EVERY_RANK
from tests.dist.spawn import run_job

pytestmark = pytest.mark.dist

WORKER = "tests.dist.ranks.rank_fault_worker"
REPLAN = "train.on_oom=replan"
# Metrics that depend on the clock.
TIMINGS = ("_s", "tokens_per_second", "tokens_per_second_per_gpu")


def job(folder: Path, fault: str, phase: str, rank: int, *overrides: str) -> tuple[int, str]:
    args = [str(folder), fault, phase, str(rank), REPLAN, *overrides]
    done = run_job(4, WORKER, args, timeout_s=150)
    assert (folder / "injected").exists(), done.stdout[-3000:]
    return done.returncode, done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, without the values that depend on the clock."""
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(TIMINGS)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def replanned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A run whose third step is planned again before any of its micro-batches ran."""
    folder = tmp_path_factory.mktemp("replanned")
    code, output = job(folder, "replanned", "step", EVERY_RANK)
    assert code == 0, output[-4000:]
    lines = metrics(folder)
    assert [line["num_oom_replans"] for line in lines] == [0, 0, 1, 1]
    counts = [line["num_microbatches_per_rank"] for line in lines]
    assert counts[2] >= 2 * counts[3], "the rows are not smaller"
    return lines


@pytest.mark.parametrize(
    ("phase", "rank", "executor"),
    [
        ("forward", 0, "megatron"),
        pytest.param("backward", 1, "megatron", marks=pytest.mark.weekly),
        pytest.param("backward", 2, "operations", marks=pytest.mark.weekly),
        pytest.param("loss", 3, "megatron", marks=pytest.mark.weekly),
    ],
)
def test_nothing_is_left_of_the_failed_attempt(
    phase: str, rank: int, executor: str, tmp_path: Path, replanned: list[dict[str, Any]]
) -> None:
    code, output = job(tmp_path, "out_of_memory", phase, rank, f"train.executor={executor}")
    assert code == 0, output[-4000:]
    assert "1 of 4 ranks failed: rank" in output
    assert "replanned with rows of half the size" in output
    assert metrics(tmp_path) == replanned


# Two layers per chunk: a rank may run out of memory between them.
WIDE = ("plan.context_parallel=dynamic", "model.num_layers=8")


@pytest.fixture(scope="module")
def wide_replanned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """As `replanned`, and DP ranks share rows."""
    folder = tmp_path_factory.mktemp("wide_replanned")
    code, output = job(folder, "replanned", "step", EVERY_RANK, *WIDE)
    assert code == 0, output[-4000:]
    lines = metrics(folder)
    assert [line["num_oom_replans"] for line in lines] == [0, 0, 1, 1]
    assert all(line["num_wide_microbatches"] > 1 for line in lines)
    return lines


@pytest.mark.parametrize(
    ("phase", "rank", "settings"),
    [
        ("layer backward", 1, ("model.recompute=full", "train.executor=operations")),
        *(
            pytest.param(*case, marks=pytest.mark.weekly)
            for case in (
                ("layer", EVERY_RANK, ()),
                ("forward", 0, ()),
                ("layer", 1, ("train.executor=operations",)),
                ("backward", 2, ()),
                ("layer backward", 3, ()),
                ("loss", 3, ()),
            )
        ),
    ],
)
def test_ranks_that_share_its_row_leave_it_too(
    phase: str,
    rank: int,
    settings: tuple[str, ...],
    tmp_path: Path,
    wide_replanned: list[dict[str, Any]],
) -> None:
    code, output = job(tmp_path, "out_of_memory", phase, rank, *WIDE, *settings)
    assert code == 0, output[-4000:]
    # Only a rank that ran out of memory itself is named; all of them raise their own error.
    assert ("1 of 4 ranks failed: rank" in output) == (rank != EVERY_RANK)
    assert "replanned with rows of half the size" in output
    found = metrics(tmp_path)
    if any("recompute" in setting for setting in settings):
        # Rows then cost more, so others are planned.
        results = ("loss", "grad_norm", "num_oom_replans")
        for one, other in zip(found, wide_replanned, strict=True):
            expected = {key: other[key] for key in results}
            assert {key: one[key] for key in results} == pytest.approx(expected, rel=1e-4)
    else:
        assert found == wide_replanned


def test_passes_for_log_probs_are_run_again(tmp_path: Path) -> None:
    """The first passes of the job compute old log-probs."""
    code, output = job(tmp_path, "out_of_memory", "log-probs", 1)
    assert code == 0, output[-4000:]
    assert [line["num_oom_replans"] for line in metrics(tmp_path)] == [0, 0, 1, 1]


def test_rows_of_one_sample_cannot_be_split(tmp_path: Path) -> None:
    count_based = ["plan.max_tokens_per_gpu=null", "plan.micro_batch_size=1"]
    code, _ = job(tmp_path, "out_of_memory", "forward", 0, *count_based)
    assert code == 1
    report = json.loads((tmp_path / "rank2.json").read_text())
    assert "though each row holds one sample" in report["error"]


@pytest.mark.weekly
def test_a_critics_step_is_run_again(tmp_path: Path) -> None:
    """The policy's step before it is not repeated, and both models take the steps they would."""
    settings = ["layout.dp=2", "layout.pp=1", "layout.vpp=1", "critic.enabled=true"]
    settings += ["objective.kind=ppo", "objective.advantage_norm=group", "critic.lr=0.01"]
    settings += ["plan.max_tokens_per_gpu=512"]
    found = []
    for fault, phase in (("out_of_memory", "critic"), ("out_of_memory", "none")):
        folder = tmp_path / phase
        folder.mkdir()
        done = run_job(
            2, WORKER, [str(folder), fault, phase, "1", REPLAN, *settings], timeout_s=150
        )
        assert done.returncode == 0, done.stdout[-4000:]
        found.append(metrics(folder))
    failed, undisturbed = found
    assert [line["num_oom_replans"] for line in failed] == [0, 0, 1, 1]
    assert [line["num_oom_replans"] for line in undisturbed] == [0, 0, 0, 0]
    for one, other in zip(failed, undisturbed, strict=True):
        for key in ("loss", "grad_norm", "critic_loss", "critic_grad_norm", "critic_value"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
