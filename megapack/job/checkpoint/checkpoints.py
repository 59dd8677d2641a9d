"""Saving and resuming a run; all ranks do both together.

A checkpoint is written between two optimizer steps. It holds everything that the next step depends
on: weights, Adam's state, the reference's weights, the critic, random states, the position in the
data, and the log-probs (and values) of the batch in progress, which were computed with older
weights. A run that resumes on the same layout takes bitwise the same steps; on another layout they
agree up to rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megapack.base.files import sync
from megapack.config.load import to_dict
from megapack.errors import CheckpointError
from megapack.job.checkpoint import folders
from megapack.job.checkpoint.folders import Checkpoint, Manifest, Position
from megapack.job.checkpoint.index import check_index, read_fault
from megapack.job.checkpoint.state import RunState
from megapack.job.checkpoint.writer import PendingSave
from megapack.job.config.sections import TrainConfig
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.ranks.agree import agree
from megapack.samples import SampleBatch

# Folders that the reference's weights may come from.
_REFERENCE = ("model.hf_path", "objective.reference_hf_path")
_BATCH_FILE = "batch.pt"


@dataclass(kw_only=True, eq=False)
class Checkpoints:
    """The checkpoints of one run."""

    config: TrainConfig
    """The run's. `train.resume`, `train.save_interval`, `train.keep_checkpoints`,
    `train.async_save` and `train.save_threads` apply here."""
    layout: Layout
    """The resolved layout."""
    state: RunState
    """This rank's tensors."""
    data_digest: str
    """`Dataset.digest`, equal on all ranks."""
    device: torch.device
    """See `agree`."""

    def __post_init__(self) -> None:
        self.folder = Path(self.config.runs_dir) / self.config.name / "checkpoints"
        # Steps at the last complete save; -1 = not saved yet.
        self._saved_at = -1
        self._pending: PendingSave | None = None
        self._blocked_s = 0.0
        self._write_s = 0.0

    def find(self) -> Checkpoint | None:
        """The checkpoint that `train.resume` names, checked against the config on every rank.

        Returns:
            None if the run starts from the beginning.

        Raises:
            CheckpointError: it does not exist, or belongs to another model or other data.
        """
        resume = self.config.train.resume
        if resume is None:
            return None
        found = agree(lambda: folders.find_checkpoint(resume, self.folder), device=self.device)
        name = {"checkpoint to resume from": str(found and found.path.resolve())}
        agree(lambda: self._check(found), device=self.device, same=name)
        return found

    def is_own(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is in this run's folder, so that the run continues there."""
        return checkpoint.path.resolve().parent == self.folder.resolve()

    def load(self, checkpoint: Checkpoint, field_names: Sequence[str]) -> Position:
        """Fill the model, the optimizer, the reference, the critic and the random states.

        A collective.

        Args:
            checkpoint: returned by `find`.
            field_names: see `save`. If the checkpoint was saved inside a batch, it must have them.

        Raises:
            CheckpointError: on every rank; nothing in the run's folder has changed.
        """
        manifest = checkpoint.manifest
        agree(lambda: self._check_batch(checkpoint, field_names), device=self.device)
        # Check before `load`, in which torch unpickles the index.
        agree(lambda: check_index(checkpoint.path / "state"), device=self.device)
        self.state.load(
            checkpoint.path / "state",
            num_updates=manifest.position.num_updates,
            num_critic_updates=manifest.position.num_critic_updates,
            with_reference=manifest.has_reference and self.state.reference is not None,
            device=self.device,
        )
        agree(lambda: self._load_rng(checkpoint), device=self.device)
        self._saved_at = manifest.position.num_steps if self.is_own(checkpoint) else -1
        return manifest.position

    def load_batch(
        self, checkpoint: Checkpoint, batch: SampleBatch, plan: Plan, field_names: Sequence[str]
    ) -> None:
        """Set the saved fields of the batch in progress.

        Raises:
            CheckpointError: the plan's first steps train on other samples than the steps that were
                taken, or the checkpoint lacks one of these fields.
        """
        manifest = checkpoint.manifest
        if samples_done_digest(plan, manifest.position.step_in_batch) != (
            manifest.samples_done_digest
        ):
            raise CheckpointError(
                f"{checkpoint.path} was saved inside a batch whose steps took other samples than "
                f"the plan for {self.layout} has in them; resume with the layout and the plan "
                "settings of its config, or from a checkpoint at a batch's end"
            )
        fields = self._check_batch(checkpoint, field_names)
        for name in field_names:
            batch.set_field(name, list(fields[name].split(batch.lengths)))

    @property
    def last_saved(self) -> Path | None:
        """The last complete checkpoint in the run's folder; None if this run has none."""
        if self._saved_at < 0:
            return None
        return folders.checkpoint_path(self.folder, self._saved_at)

    def changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Descriptions of the settings that differ from a checkpoint's, where they may."""
        now = to_dict(self.config)
        keys = [key for key in now if key not in ("name", "runs_dir")]
        found = folders.differences(checkpoint.manifest.config, now, keys)
        return [text for text in found if not text.startswith("train.resume=")]

    def due(self, num_steps: int) -> bool:
        """Whether to save after this many steps."""
        interval = self.config.train.save_interval
        return interval is not None and num_steps % interval == 0

    def save(
        self,
        position: Position,
        plan: Plan,
        batch: SampleBatch,
        field_names: Sequence[str],
    ) -> None:
        """Write a checkpoint, with `train.async_save` on threads. A collective.

        A pending save is finished first.

        Args:
            position: the position after the step just taken.
            plan, batch: the plan and the samples of that step's batch.
            field_names: fields to save inside a batch, such as the log-probs that the weights at
                the batch's start gave. All ranks have them.

        Raises:
            CheckpointError, ScheduleError: the checkpoint cannot be written. If only some ranks
                failed, the message names them. Earlier checkpoints are untouched.
        """
        pending = self._pending
        if pending is not None and pending.manifest.position.num_steps == position.num_steps:
            return
        self.finish()
        if position.num_steps == self._saved_at:
            return
        started = time.perf_counter()
        path = folders.checkpoint_path(self.folder, position.num_steps)
        manifest = self._manifest(position, plan)
        fields = field_names if position.step_in_batch else ()
        with self._removing(path):
            self._write(path, self._on_first_rank, folders.open_part, path)
            small = _small_files(batch, fields)
            self._pending = self._start(path, manifest, small)
        self._blocked_s += time.perf_counter() - started
        if not self.config.train.async_save:
            self.finish()

    @property
    def is_pending(self) -> bool:
        """Whether a save waits for `finish`; equal on all ranks."""
        return self._pending is not None

    @property
    def status(self) -> tuple[bool, bool]:
        """Whether this rank still writes, and whether it could not write."""
        pending = self._pending
        return (False, False) if pending is None else (pending.is_writing, pending.has_failed)

    def finish(self) -> Path | None:
        """Complete the pending save and remove the oldest checkpoints. A collective.

        It waits until every rank's files are on the disk. Call it once `status` is
        (False, anything) on all ranks, or (anything, True) on one.

        Returns:
            The checkpoint; None if no save is pending.

        Raises:
            CheckpointError, ScheduleError: as `save` does.
        """
        pending = self._pending
        if pending is None:
            return None
        started = time.perf_counter()
        self._pending = None
        path = pending.path
        with self._removing(path):
            self._write(path, pending.wait)
            pending.writer.finish()
            self._write(path, self._on_first_rank, folders.finish, pending.part, pending.manifest)
        keep = self.config.train.keep_checkpoints
        self._write(self.folder, self._on_first_rank, folders.thin_out, self.folder, keep)
        self._blocked_s += time.perf_counter() - started
        self._write_s += pending.write_s
        self._saved_at = pending.manifest.position.num_steps
        return path

    def abandon(self) -> None:
        """Stop this rank's part of a pending save, which stays incomplete; after an error."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call that training waited for checkpoints, and that this rank's
        threads wrote the checkpoints completed since then."""
        taken = {"checkpoint_blocked_s": self._blocked_s, "checkpoint_write_s": self._write_s}
        self._blocked_s = 0.0
        self._write_s = 0.0
        return taken

    def _start(
        self, path: Path, manifest: Manifest, small: dict[str, dict[str, torch.Tensor]]
    ) -> PendingSave:
        """Plan all files, and start to write this rank's."""
        part = folders.part_path(path)
        writer = self.state.writer(
            part / "state", num_threads=self.config.train.save_threads, device=self.device
        )
        if self.config.train.async_save:
            self._write(path, writer.stage)
        writer.plan()

        def work() -> None:
            for name, tensors in small.items():
                _write_tensors(part / name, tensors)
            writer.write()

        return PendingSave(path, manifest, writer, work)

    @contextlib.contextmanager
    def _removing(self, path: Path) -> Iterator[None]:
        """Remove the partial checkpoint after an error within the block."""
        try:
            yield
        except Exception:
            self._on_first_rank(shutil.rmtree, folders.part_path(path), True)
            raise

    def _check(self, found: Checkpoint | None) -> None:
        if found is None:
            return
        manifest = found.manifest
        changed = folders.changed_settings(manifest.config, to_dict(self.config))
        if changed:
            raise CheckpointError(
                f"{found.path} is of a run with other settings: {', '.join(changed)}; set them as "
                "they were, or train.resume=null"
            )
        if self.state.reference is not None and not manifest.has_reference:
            moved = folders.differences(manifest.config, to_dict(self.config), _REFERENCE)
            if moved:
                raise CheckpointError(
                    f"{found.path} has no reference policy, and the folder of the initial weights "
                    f"is another one: {moved[0]}; set it as it was, or objective.kl_coef=0"
                )
        if self.state.critic is not None and not manifest.has_critic:
            raise CheckpointError(
                f"{found.path} has no critic; set critic.enabled=false, or train.resume=null"
            )
        if manifest.data_digest != self.data_digest:
            raise CheckpointError(
                f"{found.path} is of a run on other samples than data.path="
                f"{self.config.data.path} gives; set the section data as it was, or "
                "train.resume=null"
            )

    def _check_batch(self, checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The saved fields of the batch in progress; raises if what the run needs is missing."""
        manifest, path = checkpoint.manifest, checkpoint.path / _BATCH_FILE
        # Objectives that need no old log-probs (SFT) save no such file.
        fields = _read_tensors(path) if path.name in manifest.files else {}
        missing = [name for name in names if name not in fields]
        if self.config.train.routing_replay == "old_logprobs":
            missing.append("recorded experts")
        if manifest.position.step_in_batch and missing:
            keys = "objective", "train.routing_replay"
            changed = folders.differences(manifest.config, to_dict(self.config), keys) or keys
            raise CheckpointError(
                f"{checkpoint.path} was saved inside a batch and has no {', '.join(missing)}, "
                f"which {', '.join(changed)} needs; set that as it was, or resume from a "
                "checkpoint at a batch's end"
            )
        return fields

    def _load_rng(self, checkpoint: Checkpoint) -> None:
        # Another layout has other random streams; they start from the seed.
        if Layout.from_payload(checkpoint.manifest.layout) == self.layout:
            set_rng_state(_read_tensors(checkpoint.path / "rng" / _rank_file()))

    def _manifest(self, position: Position, plan: Plan) -> Manifest:
        return Manifest(
            position=position,
            config=to_dict(self.config),
            layout=self.layout.to_payload(),
            plan_digest=plan.digest(),
            samples_done_digest=samples_done_digest(plan, position.step_in_batch),
            data_digest=self.data_digest,
            has_reference=self.state.reference is not None,
            has_critic=self.state.critic is not None,
            megatron_core=importlib.metadata.version("megatron-core"),
        )

    def _write(self, path: Path, work: Callable[..., object], *args: Any) -> None:
        """Run this rank's part of writing a checkpoint and agree on its success."""

        def write() -> None:
            with folders.writing(path):
                work(*args)

        agree(write, device=self.device)

    def _on_first_rank(self, work: Any, *args: Any) -> None:
        if dist.get_rank() == 0:
            work(*args)


def samples_done_digest(plan: Plan, num_steps: int) -> str:
    """A digest of the samples that a plan's first steps train on, step by step."""
    done = [step.kept_samples for step in plan.steps[:num_steps]]
    return hashlib.sha256(repr(done).encode()).hexdigest()


def _small_files(
    batch: SampleBatch, field_names: Sequence[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The content of the files outside Megatron's format: random states, the batch in progress."""
    files = {f"rng/{_rank_file()}": rng_state()}
    if dist.get_rank() == 0 and field_names:
        files[_BATCH_FILE] = {name: _flat(batch, name) for name in field_names}
    return files


def _flat(batch: SampleBatch, name: str) -> torch.Tensor:
    """A field of all samples, one after the other: [total tokens].

    A dropped sample's field is a single number, which is repeated for each of its tokens.
    """
    values = [batch.field(name, i).expand(batch.length(i)) for i in range(len(batch))]
    return torch.cat(values)


def _rank_file() -> str:
    return f"rank{dist.get_rank()}.pt"


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Given a path, torch would not say why the system refuses a write.
    with open(path, "wb") as file:
        torch.save(tensors, file)
    sync(path)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({read_fault(error)}); set train.resume to another checkpoint"
        ) from None


def rng_state() -> dict[str, torch.Tensor]:
    """This rank's random states by name: torch's, CUDA's, and those of Megatron's tracker."""
    tracked = {f"tracker.{k}": _plain(v) for k, v in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), **tracked}


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned on this rank of the same layout."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, now in states.items():
        value = state[f"tracker.{name}"]
        if isinstance(now, torch.Generator):
            now.set_state(value)
        else:
            states[name] = value
    tracker.set_states(states)


def _plain(state: Any) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state
