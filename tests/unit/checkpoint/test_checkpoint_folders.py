"""Checkpoint folders: whole or not there, found again, thinned out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megapack.checkpoint import folders as files
from megapack.checkpoint.folders import Manifest, Position
from megapack.errors import CheckpointError

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
    part = files.open_part(files.checkpoint_path(folder, num_steps))
    (part / "state" / "tensors").write_bytes(b"x" * 10)
    return files.finish(part, manifest(num_steps))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert names(tmp_path) == ["step-00000012"]
    found = files.read_checkpoint(path)
    assert found.manifest.position == manifest(12).position
    assert found.manifest.files == {"state/tensors": 10}
    assert found.manifest.config == {"seed": 1}


def test_half_written_ones_are_removed_by_the_next(tmp_path: Path) -> None:
    for num_steps in (3, 9):
        files.open_part(files.checkpoint_path(tmp_path, num_steps))
    write(tmp_path, 6)
    assert names(tmp_path) == ["step-00000006"]


def test_the_latest_is_of_most_steps_and_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num_steps in (99999999, 5, 100000000):
        write(tmp_path, num_steps)
    found = files.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "step-100000000"
    with caplog.at_level(logging.WARNING):
        (found.path / "state/tensors").write_bytes(b"x" * 9)
        (tmp_path / "step-99999999/state/tensors").unlink()
        found = files.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "step-00000005"
    assert "has 9 bytes of 10" in caplog.text
    assert "is missing" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "[" * 9999, "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / files.MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"step-00000001"):
        files.read_checkpoint(path)
    assert files.latest_checkpoint(tmp_path) is None


def refused_and_kept(tmp_path: Path, says: str) -> None:
    """Neither the checkpoint nor an older one in its place."""
    with pytest.raises(CheckpointError, match=says):
        files.latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        files.find_checkpoint(str(tmp_path / "step-00000002"), tmp_path)


def test_one_that_another_megapack_wrote_is_not_passed_over(tmp_path: Path) -> None:
    """The run would go back, and remove it."""
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    (path / files.MANIFEST).write_text('{"format": 99}')
    refused_and_kept(tmp_path, r"has format 99, this megapack reads 1; resume with the megapack")


@pytest.mark.parametrize("name", [files.MANIFEST, "state/tensors"])
def test_one_that_cannot_be_read_now_is_not_passed_over(tmp_path: Path, name: str) -> None:
    """A link to itself stands in for a server that does not answer: an error, but not absence."""
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.unlink()
    file.symlink_to(file)
    refused_and_kept(tmp_path, f"{name} cannot be read")


def test_a_name_that_is_taken_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (
        pytest.raises(CheckpointError, match=r"step-00000001 cannot be written \(Directory not"),
        files.writing(files.checkpoint_path(tmp_path, 1)),
    ):
        write(tmp_path, 1)
    assert files.latest_checkpoint(tmp_path) is not None


def test_a_manifest_that_leaves_something_out_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    values: dict[str, Any] = json.loads((path / files.MANIFEST).read_text())
    del values["plan_digest"]
    (path / files.MANIFEST).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="is no manifest"):
        files.read_checkpoint(path)


def test_a_part_is_never_found_and_its_rest_is_removed(tmp_path: Path) -> None:
    path = files.checkpoint_path(tmp_path, 3)
    part = files.open_part(path)
    (part / "state" / "old").write_text("left by a run that was killed")
    assert files.latest_checkpoint(tmp_path) is None
    assert list((files.open_part(path) / "state").iterdir()) == []


def test_thinning_and_going_back(tmp_path: Path) -> None:
    for num_steps in range(1, 6):
        write(tmp_path, num_steps)
    files.thin_out(tmp_path, None)
    assert len(names(tmp_path)) == 5
    files.thin_out(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    files.drop_after(tmp_path, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_resume_means(tmp_path: Path) -> None:
    own = tmp_path / "run" / "checkpoints"
    assert files.find_checkpoint("auto", own) is None
    own.parent.mkdir()
    first, last = write(own, 1), write(own, 2)
    for resume, expected in {
        "auto": last,
        str(tmp_path / "run"): last,
        str(first): first,
    }.items():
        found = files.find_checkpoint(resume, own)
        assert found is not None
        assert found.path == expected
    (first / "state/tensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        files.find_checkpoint(str(first), own)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        files.find_checkpoint(str(tmp_path), own)


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    files.check_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"does not fit into the \d+ MiB"):
        files.check_space(tmp_path, 1 << 60)


def test_differences_name_the_setting() -> None:
    saved = {"seed": 1, "model": {"a": 1, "b": 2}, "name": "x"}
    now = {"seed": 1, "model": {"a": 1, "b": 3, "c": None}, "name": "y"}
    assert files.differences(saved, now, ("seed", "model")) == ["model.b=3, was 2"]
    assert files.differences(saved, now, ("name",)) == ['name="y", was "x"']
