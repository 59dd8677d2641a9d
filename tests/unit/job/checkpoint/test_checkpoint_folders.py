"""Checkpoint folders: written whole or not at all, found, and removed."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from megapack.config.load import to_dict
from megapack.errors import CheckpointError
from megapack.job.checkpoint import folders
from megapack.job.checkpoint.folders import Manifest, Position, changed_settings
from megapack.job.config.sections import PlanConfig, TrainConfig

pytestmark = pytest.mark.unit


def manifest(num_steps: int) -> Manifest:
    return Manifest(
        position=Position(num_steps=num_steps, epoch=1, step_in_batch=2),
        config={"seed": 1},
        layout={"dp": 2},
        plan_digest="ab",
        samples_done_digest="cd",
        data_digest="ef",
        has_reference=True,
        megatron_core="0.16.1",
    )


def write(folder: Path, num_steps: int) -> Path:
    """A small complete checkpoint."""
    folder.mkdir(exist_ok=True)
    part = folders.open_part(folders.checkpoint_path(folder, num_steps))
    (part / "state" / "tensors").write_bytes(b"x" * 10)
    return folders.finish(part, manifest(num_steps))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_written_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert names(tmp_path) == ["step-00000012"]
    found = folders.read_checkpoint(path)
    assert found.manifest.position == manifest(12).position
    assert found.manifest.files == {"state/tensors": 10}
    assert found.manifest.config == {"seed": 1}


def test_the_latest_is_the_complete_one_with_most_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num_steps in (99999999, 5, 100000000):
        write(tmp_path, num_steps)
    found = folders.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "step-100000000"
    with caplog.at_level(logging.WARNING):
        (found.path / "state/tensors").write_bytes(b"x" * 9)
        (tmp_path / "step-99999999/state/tensors").unlink()
        found = folders.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "step-00000005"
    assert "has 9 bytes of 10" in caplog.text
    assert "is missing" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "[" * 9999, "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / folders.MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"step-00000001"):
        folders.read_checkpoint(path)
    assert folders.latest_checkpoint(tmp_path) is None


def assert_refused(tmp_path: Path, message: str) -> None:
    """Assert that neither the second checkpoint nor the older one is loaded."""
    with pytest.raises(CheckpointError, match=message):
        folders.latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        folders.find_checkpoint(str(tmp_path / "step-00000002"), tmp_path)


def test_a_checkpoint_of_another_version_is_not_skipped(tmp_path: Path) -> None:
    """A run that skipped it would go back to an older one and delete it."""
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    (path / folders.MANIFEST).write_text('{"format": 99}')
    assert_refused(tmp_path, r"has format 99, this megapack reads 1; resume with the megapack")


@pytest.mark.parametrize("name", [folders.MANIFEST, "state/tensors"])
def test_a_checkpoint_that_is_unreadable_now_is_not_skipped(tmp_path: Path, name: str) -> None:
    """A link to itself stands in for a file server that does not answer."""
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.unlink()
    file.symlink_to(file)
    assert_refused(tmp_path, f"{name} cannot be read")


def test_a_folder_of_checkpoints_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 300) / "checkpoints"
    with pytest.raises(
        CheckpointError, match=r"aaa/checkpoints cannot be read \(File name too lon"
    ):
        folders.find_checkpoint("auto", folder)


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (
        pytest.raises(CheckpointError, match=r"step-00000001 cannot be written \(Directory not"),
        folders.writing(folders.checkpoint_path(tmp_path, 1)),
    ):
        write(tmp_path, 1)
    assert folders.latest_checkpoint(tmp_path) is not None


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room within the quota"),
        (errno.EFBIG, "raise the limit of a file's size (ulimit -f)"),
        (errno.EROFS, "set runs_dir to a folder that can be written"),
        (errno.EACCES, "set runs_dir to a folder that can be written"),
        (errno.ENAMETOOLONG, "set a shorter name"),
        (errno.ESTALE, "see to that disk, or set runs_dir to a folder that can be written"),
    ],
    ids=errno.errorcode.get,
)
def test_advice_fits_the_error_of_the_system(number: int, advice: str) -> None:
    """Also where torch reports the byte at which the system refused to write."""
    error = OSError(number, os.strerror(number))
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    hidden.__context__ = error
    for one in (error, hidden):
        with pytest.raises(CheckpointError) as caught, folders.writing(Path("step-1")):
            raise one
        assert str(caught.value) == (
            f"step-1 cannot be written ({os.strerror(number)}); {advice}; earlier checkpoints are "
            "untouched: resume with train.resume=auto"
        )


def test_torchs_error_alone_may_mean_a_full_disk() -> None:
    with (
        pytest.raises(CheckpointError) as caught,
        folders.writing(Path("f"), "set another folder", ""),
    ):
        raise RuntimeError("unexpected pos 704 vs 598\nframe #0")
    assert str(caught.value) == (
        "f cannot be written (unexpected pos 704 vs 598: the disk is full, or a file too large); "
        "make room, or set another folder"
    )


def test_a_partial_checkpoint_is_never_found_and_the_next_save_removes_it(tmp_path: Path) -> None:
    part = folders.open_part(folders.checkpoint_path(tmp_path, 6))
    (part / "state" / "old").write_text("left by a run that was killed")
    assert folders.latest_checkpoint(tmp_path) is None
    write(tmp_path, 6)
    assert names(tmp_path) == ["step-00000006"]
    assert folders.read_checkpoint(tmp_path / "step-00000006").manifest.files == {
        "state/tensors": 10
    }


def test_resume_finds_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    own = tmp_path / "run" / "checkpoints"
    assert folders.find_checkpoint("auto", own) is None
    own.parent.mkdir()
    first = write(own, 1)
    last = write(own, 2)
    for resume, expected in {
        "auto": last,
        str(tmp_path / "run"): last,
        str(first): first,
    }.items():
        found = folders.find_checkpoint(resume, own)
        assert found is not None
        assert found.path == expected
    (first / "state/tensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        folders.find_checkpoint(str(first), own)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        folders.find_checkpoint(str(tmp_path), own)


def test_differences_name_the_setting() -> None:
    """A config that an earlier version wrote lacks keys; one that is gone is a difference."""
    saved = {"seed": 1, "model": {"a": 1, "b": 2, "old": 2}, "name": "x"}
    now = {"seed": 1, "model": {"a": 1, "b": 3, "c": 4}, "name": "y", "plan": {}}
    found = ["model.b=3, was 2", "model.old=null, was 2"]
    assert folders.differences(saved, now, ("seed", "model", "plan")) == found
    assert folders.differences(saved, now, ("name", "plan.a")) == ['name="y", was "x"']


def test_checkpoints_of_before_a_kernel_was_a_setting_fit() -> None:
    now = to_dict(TrainConfig(name="run", plan=PlanConfig(max_tokens_per_gpu=64)))
    saved = {**now, "model": dict(now["model"])}
    for name in ("recompute_modules", "moe_grouped_gemm", "moe_permute_fusion"):
        del saved["model"][name]
    assert changed_settings(saved, now) == []
    saved["model"]["hidden_size"] += 1
    (text,) = changed_settings(saved, now)
    assert text.startswith("model.hidden_size=")


def test_settings_that_decide_the_batches_must_stay() -> None:
    plain = to_dict(TrainConfig(name="run", plan=PlanConfig(max_tokens_per_gpu=64)))
    window = {"data": {**plain["data"], "balance_window": 4}}
    assert changed_settings(plain, {**plain, **window}) == ["data.balance_window=4, was 1"]


def test_a_reward_model_and_a_policy_do_not_resume_each_other() -> None:
    data = {"balance_window": 1}
    kinds = {k: {"objective": {"kind": k}, "data": data} for k in ("dpo", "sft", "reward")}
    assert changed_settings(kinds["sft"], kinds["dpo"]) == []
    assert changed_settings(kinds["reward"], kinds["reward"]) == []
    assert changed_settings(kinds["dpo"], kinds["reward"]) == ['objective.kind="reward", was "dpo"']
    assert changed_settings(kinds["reward"], kinds["sft"]) == ['objective.kind="sft", was "reward"']
