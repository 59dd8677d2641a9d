"""Checkpoint folders: written aside, renamed when complete, found again, and thinned out.

    checkpoints/step-00000012/checkpoint.json   what it holds, and every file with its size
                              state/            Megatron's distributed checkpoint
                              rng/rank0.pt      random states of a rank
                              batch.pt          log-probs of the batch in progress, if any

A folder is written as `step-00000012.part` and gets its name when all ranks have finished and all
is on the disk, so that a folder of that name is whole. All ranks must see the same file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.base.files import read_whole, strict_json, sync
from megapack.errors import CheckpointError, MegapackError, brief, first_line

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FORMAT = 1
_ELSE = "set train.resume to another checkpoint"
_NAME = re.compile(r"step-\d{8,}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two optimizer steps."""

    num_steps: int = 0
    """Optimizer steps since the run began."""
    num_updates: int = 0
    """Those of them that changed the weights."""
    epoch: int = 0
    """Passes over the data that are over."""
    batch: int = 0
    """Batches of this epoch that are over."""
    step_in_batch: int = 0
    """Steps of the next batch that are over; its plan and log-probs are in use where it is not
    0."""

    def after_step(self, done: int, of: int, updated: bool) -> Position:
        """Where the run stands with `done` steps of its batch's `of` taken."""
        batch_over = done == of
        return dataclasses.replace(
            self,
            num_steps=self.num_steps + 1,
            num_updates=self.num_updates + updated,
            batch=self.batch + batch_over,
            step_in_batch=0 if batch_over else done,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, besides tensors."""

    position: Position
    config: Mapping[str, Any]
    """The run's config as nested plain values."""
    layout: Mapping[str, Any]
    """Its layout as nested plain values; random states fit this layout alone."""
    plan_digest: str
    """Of the plan of the last step."""
    samples_done_digest: str
    """Of the samples that the batch in progress has already trained on, step by step."""
    data_digest: str
    """Of all samples' lengths and groups."""
    has_reference: bool
    """Whether the reference policy's weights are in it."""
    megatron_core: str
    """Version that wrote it."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of every other file, by its path in the folder."""
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


class IncompleteError(CheckpointError):
    """A folder that was a checkpoint once, or never became one: going back further is right.

    What merely cannot be read at the moment, or by this megapack, is none: a run that went back
    would remove it.
    """


def checkpoint_path(folder: Path, num_steps: int) -> Path:
    """Where the checkpoint after `num_steps` optimizer steps stands in `folder`."""
    return folder / f"step-{num_steps:08d}"


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder's manifest, if all of its files are there and as long as it says.

    Raises:
        IncompleteError: what is missing or other than written.
        CheckpointError: it cannot be read, or another megapack wrote it.
    """
    try:
        values = strict_json(read_whole(path / MANIFEST).decode("utf-8"))
        _refuse_format(path, values["format"])
        manifest = Manifest(**{**values, "position": Position(**values["position"])})
        _check_types(manifest)
        sizes = {path / name: (_size(path / name), size) for name, size in manifest.files.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError(f"{path / MANIFEST} is missing; {_ELSE}") from None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read ({error.strerror}); mend that, or {_ELSE}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IncompleteError(
            f"{path / MANIFEST} is no manifest of a checkpoint ({first_line(error)}); {_ELSE}"
        ) from None
    for file, (found, size) in sizes.items():
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            raise IncompleteError(f"{file} {state}; {_ELSE}")
    return Checkpoint(path, manifest)


def _refuse_format(path: Path, found: Any) -> None:
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {brief(found)}, this megapack reads {FORMAT}; resume with the "
            "megapack that wrote it"
        )


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError for a value that no run wrote."""
    kinds = {"config": dict, "layout": dict, "files": dict, "has_reference": bool}
    digests = ("plan_digest", "samples_done_digest", "data_digest")
    kinds |= dict.fromkeys((*digests, "megatron_core"), str)
    for name, kind in kinds.items():
        if type(getattr(manifest, name)) is not kind:
            raise ValueError(f"{name} is {brief(getattr(manifest, name))}")
    for name, count in [*vars(manifest.position).items(), *manifest.files.items()]:
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} is {brief(count)}")


def _size(file: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        return file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The complete checkpoint of most steps; damaged ones are passed over with a warning.

    Raises:
        CheckpointError: one that may be complete cannot be read.
    """
    for path in reversed(_folders(folder)):
        try:
            return read_checkpoint(path)
        except IncompleteError as error:
            logger.warning("checkpoint ignored: %s", error)
    return None


def find_checkpoint(resume: str, own_folder: Path) -> Checkpoint | None:
    """What `train.resume` means: "auto", a checkpoint's folder, or the folder of a run.

    Args:
        own_folder: `checkpoints/` of the run that resumes, for "auto".

    Returns:
        None under "auto" where there is no complete checkpoint.

    Raises:
        CheckpointError: a path that holds no complete checkpoint, or one that cannot be read.
    """
    if resume == "auto":
        return latest_checkpoint(own_folder)
    path = Path(resume)
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        return read_checkpoint(path)
    found = latest_checkpoint(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"train.resume={resume} holds no complete checkpoint; set the folder of a run or of "
            "one of its checkpoints, or auto"
        )
    return found


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses within the block is a CheckpointError about `path`."""
    try:
        yield
    except MegapackError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is how torch's writer tells it
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be written ({reason}); earlier checkpoints are untouched: make room, "
            "and resume with train.resume=auto"
        ) from error


def open_part(path: Path) -> Path:
    """An empty folder to write the checkpoint `path` into; all that were left behind are removed.

    A run that was killed leaves its half-written one, which no later step may ever reuse.
    """
    _make_folder(path.parent)
    for left in path.parent.glob("step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part = path.with_name(f"{path.name}.part")
    for name in ("state", "rng"):
        (part / name).mkdir(parents=True)
    return part


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it; a power cut does not take them back."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def finish(part: Path, manifest: Manifest) -> Path:
    """Put the manifest and everything else on the disk and give the folder its name."""
    names = sorted(str(file.relative_to(part)) for file in part.rglob("*") if file.is_file())
    sizes = {name: (part / name).stat().st_size for name in names}
    complete = dataclasses.replace(manifest, files=sizes)
    text = json.dumps(dataclasses.asdict(complete), indent=1)
    (part / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in (*part.rglob("*"), part):
        sync(path)
    path = part.with_name(part.name.removesuffix(".part"))
    # There is none of this name: a run that goes back removes those of later steps first.
    os.rename(part, path)
    sync(path.parent)
    return path


def thin_out(folder: Path, keep: int | None) -> None:
    """Remove all but the last `keep` checkpoints; None keeps all."""
    if keep is not None:
        for path in _folders(folder)[:-keep]:
            _remove(path)


def drop_after(folder: Path, num_steps: int) -> None:
    """Remove checkpoints of later steps, which a run that went back takes again."""
    with writing(folder):
        for path in reversed(_folders(folder)):
            if _num_steps(path) > num_steps:
                _remove(path)


def _remove(path: Path) -> None:
    # First out of sight: half a removed checkpoint is no damaged one that needs a warning.
    doomed = path.with_name(f"{path.name}.part")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError where a checkpoint of `num_bytes` would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"a checkpoint of {num_bytes / 2**20:.0f} MiB does not fit into the "
            f"{free / 2**20:.0f} MiB that are free at {folder}; make room, or lower "
            "train.keep_checkpoints, and resume with train.resume=auto"
        )


def differences(saved: Any, now: Any, keys: Sequence[str]) -> list[str]:
    """Which of the dotted config keys (sections count whole) have other values, in words."""
    found = []
    for key in keys:
        before, after = _value(saved, key), _value(now, key)
        if isinstance(before, dict) and isinstance(after, dict):
            inner = [f"{key}.{name}" for name in sorted(before.keys() | after.keys())]
            found += differences(saved, now, inner)
        elif before != after:
            found.append(f"{key}={json.dumps(after)}, was {json.dumps(before)}")
    return found


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _folders(folder: Path) -> list[Path]:
    """Checkpoints by their names, of fewest steps first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(named, key=_num_steps)


def _num_steps(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
