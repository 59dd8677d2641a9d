"""Each rank only reads the samples of its own plans."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megapack.job.data.generated import generate_rollouts
from tests.dist.spawn import ROOT, checked_job, rank_reports, run_job

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = ["name=run", "data.prompts_per_batch=4", "plan.global_batch_size=8"]
SETTINGS += ["train.entropy_interval=1"]
DP2 = ["layout.dp=2", "layout.pp=1", "layout.vpp=1"]


def write_folder(folder: Path) -> None:
    """Eight prompt groups of four generated samples, in two files."""
    folder.mkdir()
    records = generate_rollouts(8, 4, seed=0)
    for name, part in {"a.jsonl": records[:12], "b.jsonl": records[12:]}.items():
        rows = [
            {
                "group": r.group,
                "rollout": r.rollout,
                "prompt_ids": r.prompt_ids.tolist(),
                "response_ids": r.response_ids.tolist(),
                "reward": r.reward,
            }
            for r in part
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_rank_only_reads_its_own_samples(tmp_path: Path) -> None:
    write_folder(tmp_path / "data")
    settings = [*SETTINGS, *DP2, f"data.path={tmp_path / 'data'}", f"runs_dir={tmp_path / 'runs'}"]
    checked_job(
        2, "tests.dist.train.data_worker", [str(CONFIG), str(tmp_path), *settings], timeout_s=200
    )
    ranks = rank_reports(tmp_path, 2)
    for rank in ranks:
        assert rank["num_samples"] == 32
        assert rank["read"] == rank["planned"]
        assert len(rank["read"]) < 32
    read = [set(rank["read"]) for rank in ranks]
    assert read[0] | read[1] == set(range(32))
    assert not read[0] & read[1], "both passes use one plan, so no sample is read twice"
    assert len(list((tmp_path / "data").glob(".data.*.megapack-index.npy"))) == 1


@pytest.mark.weekly
def test_files_and_memory_give_the_same_metrics(tmp_path: Path) -> None:
    write_folder(tmp_path / "data")
    sources = {
        "memory": ["data.num_generated=32"],
        # A larger forward budget: log-probs are computed on other ranks than they are trained on.
        "files": [f"data.path={tmp_path / 'data'}", "plan.forward_max_tokens_per_gpu=4096"],
    }
    results = {}
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        args = ["train", str(CONFIG), *SETTINGS, *DP2, *source]
        done = run_job(2, "megapack", args, timeout_s=200, cwd=tmp_path / name)
        assert done.returncode == 0, done.stdout[-6000:]
        text = (tmp_path / name / "runs/run/metrics.jsonl").read_text()
        results[name] = [json.loads(line) for line in text.splitlines()]
    assert len(results["files"]) == 4
    for one, other in zip(results["memory"], results["files"], strict=True):
        for key in ("loss", "grad_norm", "entropy_nats", "kl_ref_nats"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key


def test_a_run_resumes_on_equal_samples_alone(tmp_path: Path) -> None:
    """The other samples have equal lengths, and their file an equal size and modification time."""
    write_folder(tmp_path / "data")
    path = tmp_path / "data" / "a.jsonl"
    before, text = path.stat(), path.read_text()
    args = ["train", str(CONFIG), *SETTINGS, "layout.dp=1", *DP2[1:], "train.resume=auto"]
    args += [f"data.path={tmp_path / 'data'}", "train.save_interval=1", "train.num_batches=1"]
    assert run_job(1, "megapack", args, timeout_s=200, cwd=tmp_path).returncode == 0
    path.write_text(text.replace('"reward": 1.0', '"reward": 0.5', 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = run_job(1, "megapack", args, timeout_s=200, cwd=tmp_path)
    assert done.returncode == 2
    assert "is of a run on other samples than data.path" in done.stdout
    path.write_text(text)
    done = run_job(1, "megapack", args, timeout_s=200, cwd=tmp_path)
    assert done.returncode == 0
    assert "resumed after step" in done.stdout
