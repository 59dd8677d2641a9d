"""Checkpoint folders: written under another name, renamed when complete, found, and removed.

    checkpoints/step-00000012/checkpoint.json   the manifest, with every file and its size
                              state/            Megatron's distributed checkpoint
                              rng/rank0.pt      random states of a rank
                              batch.pt          log-probs of the batch in progress, if any; with a
                                                critic values, advantages and returns

A folder is written as `step-00000012.part`. It is renamed when all ranks have finished and all
files are on the disk, so a folder without `.part` is complete. All ranks must see the same file
system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.base.files import read_text, strict_json, sync
from megapack.errors import CheckpointError, MegapackError, brief, first_line

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FORMAT = 1
_AFTER_WRITING = "; earlier checkpoints are untouched: resume with train.resume=auto"
_ELSEWHERE = "set runs_dir to a folder that can be written"
# Error number of a write -> what to do; None: write elsewhere.
_WRITE_ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENAMETOOLONG: "set a shorter name",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM)),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ELOOP)),
}
_REMEDY = "set train.resume to another checkpoint"
_NAME = re.compile(r"step-\d{8,}")
# Settings that must not change on resume: tensors, or the order of the data, would not fit. A
# section stands for all of its settings, except for those in `_FREE`.
_FIXED = (
    *("seed", "model", "data.prompts_per_batch", "data.shuffle", "data.balance_window"),
    *("optim.name", "optim.distributed_optimizer"),
)
_FREE = (
    *("model.recompute", "model.attention", "model.bias_activation_fusion"),
    *("model.gradient_accumulation_fusion", "model.moe_grouped_gemm", "model.moe_permute_fusion"),
    # The folder may have moved; its sizes are keys of their own. Classes have the same tensors.
    *("model.hf_path", "model.megatron_class"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """A run's progress between two optimizer steps."""

    num_steps: int = 0
    """Optimizer steps since the run began."""
    num_updates: int = 0
    """Steps that changed the weights: Megatron skips the update if a gradient has NaN or
    infinity."""
    num_critic_updates: int = 0
    """Steps that changed the critic's weights."""
    epoch: int = 0
    """Finished passes over the data."""
    batch: int = 0
    """Finished batches of this epoch."""
    step_in_batch: int = 0
    """Finished steps of the next batch. If it is not 0, that batch's plan and log-probs are in
    use."""

    def after_step(
        self, done: int, of: int, updated: bool, critic_updated: bool = False
    ) -> Position:
        """The position after the batch's step number `done`, from 1, of `of` steps.

        Args:
            updated, critic_updated: whether the step changed the weights.
        """
        batch_over = done == of
        return dataclasses.replace(
            self,
            num_steps=self.num_steps + 1,
            num_updates=self.num_updates + updated,
            num_critic_updates=self.num_critic_updates + critic_updated,
            batch=self.batch + batch_over,
            step_in_batch=0 if batch_over else done,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of checkpoint.json."""

    position: Position
    config: Mapping[str, Any]
    """The run's config as nested plain values."""
    layout: Mapping[str, Any]
    """The run's layout as nested plain values; the random states fit this layout only."""
    plan_digest: str
    """Digest of the last step's plan."""
    samples_done_digest: str
    """Digest of the samples that the batch in progress has already trained on, step by step."""
    data_digest: str
    """`Dataset.digest`."""
    has_reference: bool
    """Whether the checkpoint has the reference policy's weights."""
    megatron_core: str
    """The Megatron-Core version that wrote the checkpoint."""
    has_critic: bool = False
    """Whether the checkpoint has a critic's weights and optimizer."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of every other file, by its path in the folder."""
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


class IncompleteError(CheckpointError):
    """The checkpoint is damaged or was never finished, so using an older one is safe.

    It is not raised for a checkpoint that is only unreadable now, or that another version wrote: a
    run that went back to an older one would delete it.
    """


def checkpoint_path(folder: Path, num_steps: int) -> Path:
    """The folder within `folder` of the checkpoint after `num_steps` optimizer steps."""
    return folder / f"step-{num_steps:08d}"


def part_path(path: Path) -> Path:
    """The name of the folder that becomes the checkpoint `path` when it is complete."""
    return path.with_name(f"{path.name}.part")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check that all its files exist with the listed sizes.

    Raises:
        IncompleteError: a file is missing or has another size, or the manifest is damaged.
        CheckpointError: it cannot be read, or another version of megapack wrote it.
    """
    try:
        values = strict_json(read_text(path / MANIFEST))
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {brief(values['format'])}, this megapack reads {FORMAT}; "
                "resume with the megapack that wrote it"
            )
        manifest = Manifest(**{**values, "position": Position(**values["position"])})
        _check_types(manifest)
        sizes = {path / name: (_size(path / name), size) for name, size in manifest.files.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError(f"{path / MANIFEST} is missing; {_REMEDY}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IncompleteError(
            f"{path / MANIFEST} is not a checkpoint's manifest ({first_line(error)}); {_REMEDY}"
        ) from None
    for file, (found, size) in sizes.items():
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            raise IncompleteError(f"{file} {state}; {_REMEDY}")
    return Checkpoint(path, manifest)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    where = error.filename or path
    return CheckpointError(f"{where} cannot be read ({error.strerror}); fix that, or {_REMEDY}")


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError for a value that no run wrote."""
    names = ("config", "layout", "files")
    kinds: dict[str, type] = dict.fromkeys(names, dict)
    kinds |= dict.fromkeys(("has_reference", "has_critic"), bool)
    digests = ("plan_digest", "samples_done_digest", "data_digest")
    kinds |= dict.fromkeys((*digests, "megatron_core"), str)
    for name, kind in kinds.items():
        if type(getattr(manifest, name)) is not kind:
            raise ValueError(f"{name} is {brief(getattr(manifest, name))}")
    for name, count in [*vars(manifest.position).items(), *manifest.files.items()]:
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} is {brief(count)}")


def _size(file: Path) -> int | None:
    """Bytes of a file; None if it does not exist."""
    try:
        return file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The complete checkpoint with the most steps; damaged ones are skipped with a warning.

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
    """The checkpoint that `train.resume` names.

    Args:
        resume: "auto", a checkpoint's folder, or a run's folder.
        own_folder: `checkpoints/` of the run that resumes, for "auto".

    Returns:
        None under "auto" if there is no complete checkpoint.

    Raises:
        CheckpointError: the path has no complete checkpoint, or one that cannot be read.
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
def writing(path: Path, elsewhere: str = _ELSEWHERE, after: str = _AFTER_WRITING) -> Iterator[None]:
    """Turn errors of writing within the block into a CheckpointError about `path`.

    Args:
        elsewhere: what to do where this folder cannot be written at all.
        after: the end of the message.
    """
    try:
        yield
    except MegapackError:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        raise CheckpointError(
            f"{path} cannot be written ({_fault(error, elsewhere)}{after}"
        ) from error


def _fault(error: BaseException, elsewhere: str) -> str:
    """Why a file could not be written, and what to do: "No space left on device); make room".

    Where the system refuses a write of torch, torch's own error says at which byte of a file it is.
    """
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        reason = f"{first_line(error)}: the disk is full, or a file too large"
        return f"{reason}); make room, or {elsewhere}"
    advice = _WRITE_ADVICE.get(cause.errno or 0, f"see to that disk, or {elsewhere}")
    return f"{cause.strerror}); {advice or elsewhere}"


def open_part(path: Path) -> Path:
    """Make an empty folder for writing the checkpoint `path`; remove all leftover `.part` folders.

    A killed run leaves a partial checkpoint behind, and a later save with the same name may never
    come.
    """
    _make_folder(path.parent)
    for leftover in path.parent.glob("step-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    part = part_path(path)
    for name in ("state", "rng"):
        (part / name).mkdir(parents=True)
    return part


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, synced so that they survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def finish(part: Path, manifest: Manifest) -> Path:
    """Write the manifest, sync all files to the disk, and give the folder its final name."""
    names = sorted(str(file.relative_to(part)) for file in part.rglob("*") if file.is_file())
    sizes = {name: (part / name).stat().st_size for name in names}
    complete = dataclasses.replace(manifest, files=sizes)
    text = json.dumps(dataclasses.asdict(complete), indent=1)
    (part / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in (*part.rglob("*"), part):
        sync(path)
    path = part.with_name(part.name.removesuffix(".part"))
    # The name is free: a run that went back has removed the checkpoints of later steps.
    os.rename(part, path)
    sync(path.parent)
    return path


def thin_out(folder: Path, keep: int | None) -> None:
    """Remove all but the last `keep` checkpoints; None keeps all."""
    if keep is not None:
        for path in _folders(folder)[:-keep]:
            _remove(path)


def drop_after(folder: Path, num_steps: int) -> None:
    """Remove checkpoints of later steps; a run that went back repeats these steps."""
    with writing(folder):
        for path in reversed(_folders(folder)):
            if _num_steps(path) > num_steps:
                _remove(path)


def _remove(path: Path) -> None:
    # Rename first, so that a half-deleted folder is not reported as damaged.
    part = part_path(path)
    shutil.rmtree(part, ignore_errors=True)
    os.rename(path, part)
    shutil.rmtree(part, ignore_errors=True)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError if an export does not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"an export of {num_bytes / 2**20:.0f} MiB does not fit into the "
            f"{free / 2**20:.0f} MiB that are free at {folder}; make room, or set another folder"
        )


def differences(saved: Any, now: Any, keys: Sequence[str]) -> list[str]:
    """Descriptions of the config keys whose values differ, such as "model.b=3, was 2".

    A key that the saved config lacks is no difference: an earlier version wrote it.

    Args:
        keys: dotted keys. A section stands for all of its keys.
    """
    found = []
    for key in keys:
        before = _value(saved, key, absent := object())
        after = _value(now, key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(saved, now, [f"{key}.{name}" for name in sorted(before)])
        elif before is not absent and before != after:
            found.append(f"{key}={json.dumps(after)}, was {json.dumps(before)}")
    return found


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the settings that differ from a checkpoint's and must not."""
    found = differences(saved, now, _FIXED)
    kinds = differences(saved, now, ("objective.kind",))
    # A value head does not fit a model with a vocabulary head.
    found += [text for text in kinds if '"reward"' in text]
    return [text for text in found if not text.startswith(_FREE)]


def _value(config: Any, key: str, absent: object = None) -> Any:
    for name in key.split("."):
        config = config.get(name, absent) if isinstance(config, dict) else absent
    return config


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders sorted by steps; not checked for completeness."""
    try:
        if not folder.is_dir():
            return []
        named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError as error:
        raise _unreadable(folder, error) from None
    return sorted(named, key=_num_steps)


def _num_steps(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
