"""A run that is killed and resumed takes the same steps as one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megapack.errors import RunInterrupted
from tests.dist.spawn import ROOT, children, run_job, running_ranks
from tests.marks import needs_hybrid, needs_muon

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
# Four batches of two steps each: the checkpoint after 3 steps is inside a batch.
SETTINGS = [
    *("name=run", "data.num_generated=64", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("data.shuffle=true", "train.save_interval=3", "train.keep_checkpoints=null"),
    "train.entropy_interval=1",
]
SFT = ("objective.kind=sft", "objective.kl_coef=0.0")
NUM_STEPS = 8
SYNC, ASYNC = "train.async_save=false", "train.async_save=true"
WEEKLY = pytest.mark.weekly
# Less than the largest file of a checkpoint.
LIMIT = 100_000
DP2 = ("layout.dp=2", "layout.pp=1", "layout.vpp=1")
PP2_VPP2 = ("layout.dp=1", "layout.pp=2", "layout.vpp=2")
TP2 = ("layout.dp=1", "layout.tp=2", "layout.pp=1", "layout.vpp=1")
PP2 = ("layout.dp=1", "layout.pp=2", "layout.vpp=1")
FIRST_STAGE = "[embedding.*, decoder.layers.0.*, decoder.layers.1.*]"
UNEVEN = (*PP2_VPP2, "layout.pipeline_model_parallel_layout=Et*2|t|t|L")
PLAIN = "optim.distributed_optimizer=false"


def job(
    folder: Path, *overrides: str, world: int = 2, max_file_bytes: int | None = None
) -> tuple[int, str]:
    """Exit code and output of the main job in `folder`."""
    args = ["train", str(CONFIG), *SETTINGS, *overrides]
    done = run_job(
        world, "megapack", args, timeout_s=240, cwd=folder, max_file_bytes=max_file_bytes
    )
    return done.returncode, done.stdout


def finished(folder: Path, *overrides: str, world: int = 2) -> list[dict[str, Any]]:
    """The metrics of a job that must succeed."""
    code, output = job(folder, *overrides, world=world)
    assert code == 0, output[-6000:]
    return metrics(folder)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    path = folder / "runs/run/metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def running(
    folder: Path, *overrides: str, after_steps: int, world: int = 2
) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose job has written some steps; its output goes to job.log."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", str(world), "-m", "megapack", "train", str(CONFIG), *SETTINGS]
    with open(folder / "job.log", "wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, *launch, *overrides],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 200
        while len(metrics(folder)) < after_steps:
            assert launcher.poll() is None, "the job ended too early"
            assert time.monotonic() < deadline, "the job takes no steps"
            time.sleep(0.01)
        yield launcher
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def killed(folder: Path, *overrides: str, after_steps: int, world: int = 2) -> None:
    """Run until some steps and a checkpoint are written, then SIGKILL every rank."""

    def is_saved() -> bool:
        # With async_save the steps after a checkpoint may be written before it is complete.
        return any(not name.endswith(".part") for name in names(folder))

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(job, folder, *overrides, world=world)
        while len(metrics(folder)) < after_steps or not is_saved():
            assert not run.done(), "the job ended too early, or saved no checkpoint"
            time.sleep(0.01)
        ranks = running_ranks()
        assert len(ranks) == world
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        assert run.result()[0] != 0


def assert_same_steps(
    lines: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], rel: float
) -> None:
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for one, other in zip(lines, expected, strict=True):
        assert one["lr"] == other["lr"]
        for key in ("loss", "grad_norm", "entropy_nats", "kl_ref_nats", "kl_old_nats"):
            assert one[key] == pytest.approx(other[key], rel=rel, abs=rel / 10), (one["step"], key)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = finished(folder, *DP2)
    assert len(lines) == NUM_STEPS
    assert len({line["loss"] for line in lines}) == NUM_STEPS
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs/run/checkpoints").iterdir())


def copy_of_run(undisturbed: Path, folder: Path, *, until: int) -> Path:
    """The run's folder as it was when the checkpoint after `until` steps was its last."""
    run = folder / "runs/run"
    shutil.copytree(undisturbed / "runs/run", run)
    for path in (run / "checkpoints").iterdir():
        if path.name > f"step-{until:08d}":
            shutil.rmtree(path)
    return run


@pytest.mark.parametrize("saving", [SYNC, pytest.param(ASYNC, marks=WEEKLY)])
def test_killed_and_resumed_bit_by_bit(undisturbed: Path, tmp_path: Path, saving: str) -> None:
    killed(tmp_path, *DP2, saving, "train.resume=auto", after_steps=5)
    assert len(metrics(tmp_path)) < NUM_STEPS
    lines = finished(tmp_path, *DP2, saving, "train.resume=auto")
    assert_same_steps(lines, metrics(undisturbed), rel=0.0)
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000008"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """If torchrun is killed, its ranks save and end, as after a signal."""
    many = ("data.num_generated=2048", "data.prompts_per_batch=8")
    with running(tmp_path, *DP2, *many, after_steps=2) as launcher:
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 90
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline, "ranks train on without their launcher"
            time.sleep(0.1)
    assert "torchrun is gone" in (tmp_path / "job.log").read_text()
    assert names(tmp_path)[-1] == f"step-{len(metrics(tmp_path)):08d}"


@pytest.mark.parametrize("saving", [pytest.param(SYNC, marks=WEEKLY), ASYNC])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(
    undisturbed: Path, tmp_path: Path, saving: str
) -> None:
    with running(tmp_path, *DP2, saving, "train.resume=auto", after_steps=2) as launcher:
        os.kill(children(launcher.pid)[-1], signal.SIGUSR1)
        assert launcher.wait(100) != 0
    num_steps = len(metrics(tmp_path))
    output = (tmp_path / "job.log").read_text()
    assert num_steps < NUM_STEPS
    assert names(tmp_path)[-1] == f"step-{num_steps:08d}"
    assert f"megapack: a signal ended the run after step {num_steps}; it is saved" in output
    assert 'Traceback (most recent call last):\n  File "' not in output.split("megapack: ")[0]
    assert f"exitcode  : {RunInterrupted.exit_code}" in output
    lines = finished(tmp_path, *DP2, "train.resume=auto")
    assert_same_steps(lines, metrics(undisturbed), rel=0.0)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(PP2_VPP2, marks=WEEKLY), pytest.param(TP2, marks=WEEKLY), UNEVEN],
    ids=["pp2_vpp2", "tp2", "uneven"],
)
def test_resumed_on_another_layout(
    undisturbed: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    copy_of_run(undisturbed, tmp_path, until=3)
    lines = finished(tmp_path, *layout, "train.resume=auto")
    assert_same_steps(lines, metrics(undisturbed), rel=1e-5)


@pytest.mark.weekly
def test_experts_and_a_frozen_stage_resumed_on_ep2(tmp_path: Path) -> None:
    """The first of two stages is frozen; experts and their biases move to other ranks."""
    settings = [
        *(
            "model.num_experts=4",
            "model.moe_balance_loss_coef=0.1",
            "model.moe_bias_update_rate=0.1",
        ),
        *("model.moe_score_function=sigmoid", f"model.freeze={FIRST_STAGE}", "optim.lr=0.01"),
    ]
    whole = finished(tmp_path, *PP2, *settings)
    copy_of_run(tmp_path, tmp_path / "other", until=3)
    lines = finished(tmp_path / "other", *DP2, *settings, "layout.ep=2", "train.resume=auto")
    assert_same_steps(lines, whole, rel=1e-5)


@WEEKLY
def test_whole_experts_of_tensor_parallel_ranks_resumed_in_halves_and_copies(
    tmp_path: Path,
) -> None:
    """dp2, then tp2 with two of four experts a rank; from there half of each, and copies of all.

    Metrics hold the gradient norm, so each expert must be in it, and once.
    """
    settings = ["model.num_experts=4", "model.moe_balance_loss_coef=0.1", "optim.lr=0.01"]
    tp2 = [*TP2, *settings, "layout.sequence_parallel=true", "train.resume=auto"]
    whole = finished(tmp_path, *DP2, *settings)
    copy_of_run(tmp_path, tmp_path / "etp1", until=3)
    lines = finished(tmp_path / "etp1", *tp2, "layout.ep=2")
    assert_same_steps(lines, whole, rel=1e-5)
    for name, experts in {"halves": "layout.etp=null", "copies": "layout.etp=1"}.items():
        copy_of_run(tmp_path / "etp1", tmp_path / name, until=6)
        lines = finished(tmp_path / name, *tp2, experts)
        assert_same_steps(lines, whole, rel=1e-5)


@needs_hybrid
@WEEKLY
def test_a_run_of_a_gpt_model_resumes_as_a_hybrid_model(tmp_path: Path) -> None:
    """And goes on bit by bit: with the optimizer's state, of experts and of a depth of MTP too."""
    settings = ["model.num_experts=4", "model.mtp_num_layers=1", "optim.lr=0.01"]
    whole = finished(tmp_path, *DP2, *settings, "model.megatron_class=gpt")
    copy_of_run(tmp_path, tmp_path / "other", until=3)
    resumed = ("model.megatron_class=hybrid", "train.resume=auto")
    lines = finished(tmp_path / "other", *DP2, *settings, *resumed)
    assert_same_steps(lines, whole, rel=0.0)


@needs_muon
@pytest.mark.weekly
def test_muon_resumes_bit_by_bit(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
    muon = (*DP2, PLAIN, "optim.name=muon")
    lines = finished(whole, *muon)
    copy_of_run(whole, again, until=3)
    code, output = job(again, *DP2, PLAIN, "train.resume=auto")
    assert code != 0
    assert 'optim.name="adam", was "muon"' in output
    assert_same_steps(finished(again, *muon, "train.resume=auto"), lines, rel=0.0)


@WEEKLY
def test_a_run_that_trains_only_experts_is_resumed(tmp_path: Path) -> None:
    """The optimizer of the other parameters, all frozen, is empty on every rank."""
    frozen = "[embedding.*, '*.self_attention.*', '*norm*', '*.router.*']"
    settings = [*DP2, "model.num_experts=4", "layout.ep=2", f"model.freeze={frozen}"]
    whole = finished(tmp_path, *settings)
    copy_of_run(tmp_path, tmp_path / "other", until=3)
    lines = finished(tmp_path / "other", *settings, "train.resume=auto")
    assert_same_steps(lines, whole, rel=0.0)


@WEEKLY
def test_batches_of_equal_work_resume_within_their_window(tmp_path: Path) -> None:
    """The run resumes in the second of four batches that exchanged prompt groups, on another layout
    and with a cost model that is measured."""
    settings = ["data.balance_window=4", "train.resume=auto"]
    whole = finished(tmp_path, *DP2, *settings)
    tokens = [whole[k]["tokens"] + whole[k + 1]["tokens"] for k in range(0, NUM_STEPS, 2)]
    assert max(tokens) < 1.1 * min(tokens)
    copy_of_run(tmp_path, tmp_path / "other", until=3)
    lines = finished(tmp_path / "other", *PP2_VPP2, *settings, "plan.calibrate=online")
    assert_same_steps(lines, whole, rel=1e-5)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in whole]


def test_damaged_checkpoints_are_passed_over(undisturbed: Path, tmp_path: Path) -> None:
    run = copy_of_run(undisturbed, tmp_path, until=8)
    tensors = max((run / "checkpoints/step-00000006/state").iterdir(), key=_size)
    tensors.write_bytes(tensors.read_bytes()[:-100])
    shutil.rmtree(run / "checkpoints/step-00000008/state")
    (run / "checkpoints/step-00000009.part").mkdir()
    code, output = job(tmp_path, *DP2, "train.resume=auto", "train.log_interval=2")
    assert code == 0, output[-6000:]
    assert "\nchanged since then: train.log_interval=2, was 1\n" in output
    assert f"checkpoint ignored: {tensors.relative_to(tmp_path)} has" in output
    assert "step-00000008/state" in output
    assert "is missing" in output
    assert "resumed after step 3" in output
    assert_same_steps(metrics(tmp_path), metrics(undisturbed), rel=0.0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_run_that_does_not_fit_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    copy_of_run(undisturbed, tmp_path, until=8)
    before = (names(tmp_path), metrics(tmp_path))
    code, output = job(tmp_path, *DP2, "train.resume=auto", "data.generated_seed=7")
    assert code != 0
    assert "set the section data as it was" in output
    assert (names(tmp_path), metrics(tmp_path)) == before


@pytest.mark.weekly
def test_the_objective_cannot_change_inside_a_batch(tmp_path: Path) -> None:
    """SFT stores no old log-probs: SFT can resume without them, another objective cannot."""
    settings = [*DP2, *SFT]
    whole = finished(tmp_path, *settings)
    copy_of_run(tmp_path, tmp_path / "other", until=3)
    before = names(tmp_path / "other"), metrics(tmp_path / "other")
    code, output = job(tmp_path / "other", *DP2, "train.resume=auto")
    assert code != 0
    assert "has no old_logprobs" in output, output[-3000:]
    assert 'was "sft"' in output
    assert (names(tmp_path / "other"), metrics(tmp_path / "other")) == before
    lines = finished(tmp_path / "other", *settings, "train.resume=auto")
    assert [line["loss"] for line in lines] == [line["loss"] for line in whole]


def test_a_resume_that_fails_leaves_later_checkpoints(undisturbed: Path, tmp_path: Path) -> None:
    """Tensors of the right size with wrong content are only noticed when they are read."""
    shutil.copytree(undisturbed / "runs", tmp_path / "runs")
    bad = tmp_path / "runs/run/checkpoints/step-00000003"
    for path in (bad / "state").glob("*.distcp"):
        path.write_bytes(b"\0" * path.stat().st_size)
    before = (names(tmp_path), metrics(tmp_path))
    code, output = job(tmp_path, *DP2, f"train.resume={bad}")
    assert code != 0
    (line,) = {line for line in output.splitlines() if line.startswith("megapack: ")}
    assert "step-00000003/state cannot be loaded (UnpicklingError: " in line, output[-3000:]
    assert (names(tmp_path), metrics(tmp_path)) == before


@pytest.mark.parametrize("saving", [SYNC, pytest.param(ASYNC, marks=WEEKLY)])
def test_a_full_disk_leaves_the_last_checkpoint(
    undisturbed: Path, tmp_path: Path, saving: str
) -> None:
    """A limit on the size of files simulates a full disk: writes fail half-way."""
    copy_of_run(undisturbed, tmp_path, until=3)
    code, output = job(tmp_path, *DP2, saving, "train.resume=auto", max_file_bytes=LIMIT)
    assert code != 0
    says = "cannot be written (File too large); raise the limit of a file's size (ulimit -f)"
    assert says in output, output[-3000:]
    assert names(tmp_path) == ["step-00000003"]
    lines = finished(tmp_path, *DP2, "train.resume=auto")
    assert_same_steps(lines, metrics(undisturbed), rel=0.0)
