"""The tensors of a run in Megatron's distributed checkpoint format, which loads on any layout.

Only tensors are saved, each under its name in the whole model. The other values of an optimizer's
state dict (learning rates, betas) follow from the config and the number of updates. The format's
index is a pickle, which is checked before torch reads it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from megapack.base.files import read_whole
from megapack.checkpoint.folders import writing
from megapack.errors import CheckpointError
from megapack.model.head import unwrapped
from megapack.model.overlap import finish_param_gathers
from megapack.ranks.agree import agree

# Each layer is saved under its number in the whole model, and optimizer state by parameter, so the
# saved names do not depend on the layout.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
# Names that the pickled index of a checkpoint of tensors needs. BytesStorageMetadata, for entries
# that are pickles themselves, is not among them.
_INDEX_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata"),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class RunState:
    """Model, optimizer and reference weights of one rank, as a sharded state dict.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
        optimizer: Megatron's, for these chunks.
        reference: the reference policy's value of each parameter, or None; `load` fills these
            tensors in place.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        reference: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._reference = reference

    def num_bytes(self) -> int:
        """About the bytes that this rank writes: those of tensors whose main copy it holds."""
        model = [t for t in nested_values(self._model()) if _is_tensor(t)]
        written = [t.data for t in model if is_main_replica(t.replica_id)]
        weights = sum(data.nbytes for data in written)
        # Adam's two moments and the main weights, each in fp32: 3 * 4 bytes.
        adam = sum(data.numel() * 12 for data in written)
        return weights * (2 if self._reference else 1) + adam

    def save(self, folder: Path, *, device: torch.device) -> None:
        """Write into an empty folder that all ranks see. A collective.

        Args:
            device: see `agree`.

        Raises:
            CheckpointError: on every rank, if one of them could not write (a full disk).
        """
        finish_param_gathers(self._chunks)
        # This gathers within data-parallel groups; an error must reach the other groups too.
        sharded = agree(lambda: self._sharded(is_loading=False), device=device)
        # The steps of Megatron's own `save`, with agreement in between: there rank 0 writes two
        # small files alone, and an error would leave the other ranks waiting.
        tensors, common = save_preprocess(sharded)
        agree(lambda: _write_common(common, folder), device=device)
        try:
            _write_tensors(tensors, folder)
        except torch_checkpoint.CheckpointException as error:
            failed = {rank: " ".join(str(why[0]).split()) for rank, why in error.failures.items()}
            raise CheckpointError(
                f"{folder} cannot be written (by rank: {failed}); earlier checkpoints are "
                "untouched: make room or make the disk writable, and resume with train.resume=auto"
            ) from error
        agree(lambda: _write_format(folder), device=device)

    def load(self, folder: Path, *, num_updates: int, with_reference: bool) -> None:
        """Read what `save` wrote, on any layout. A collective.

        Args:
            num_updates: Adam's step count.
            with_reference: load the reference's weights too; the folder must have them.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or cannot be read.
        """
        inner = _inner_optimizers(self._optimizer)
        for one in inner.values():
            _set_update_count(one, num_updates)
        sharded = self._sharded(is_loading=True)
        if not with_reference:
            sharded.pop("reference", None)
        try:
            loaded = dist_checkpointing.load(sharded, str(folder))
        except (Exception, torch_checkpoint.CheckpointException) as error:
            # torch raises CheckpointException, a BaseException, if any rank failed.
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{folder} cannot be loaded ({type(error).__name__}: {reason}); set train.resume "
                "to an earlier checkpoint"
            ) from error
        for v, chunk in enumerate(self._chunks):
            # Not strict, because extra states (FP8 scales) are not saved. Tensors are complete.
            unwrapped(chunk).load_state_dict(loaded[f"model{v}"], strict=False)
        for index, one in inner.items():
            _load_optimizer(one, loaded["optimizer"][index], num_updates)
        for name, value in loaded.get("reference", {}).items():
            self._reference_tensors()[name].data.copy_(value)

    def _sharded(self, is_loading: bool) -> dict[str, Any]:
        model = self._model()
        sharded = dict(model)
        inner = _inner_optimizers(self._optimizer)
        if inner:
            with _step_counts(inner.values()):
                state = {
                    index: one.sharded_state_dict(
                        model, is_loading=is_loading, metadata=dict(_METADATA)
                    )
                    for index, one in inner.items()
                }
            sharded["optimizer"] = dict_list_map_outplace(_tensors_only, state)
        if self._reference is not None:
            tensors = _by_name(model)
            sharded["reference"] = {
                name: make_sharded_optimizer_tensor(tensors[name], value, "reference")
                for name, value in self._reference_tensors(model).items()
            }
        return sharded

    def _model(self) -> dict[str, Any]:
        states = [unwrapped(c).sharded_state_dict(metadata=dict(_METADATA)) for c in self._chunks]
        return {
            f"model{v}": {name: value for name, value in state.items() if _is_tensor(value)}
            for v, state in enumerate(states)
        }

    def _reference_tensors(self, model: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """The reference's tensors under the model's names."""
        assert self._reference is not None
        tensors = _by_name(self._model() if model is None else model)
        return {n: self._reference[t.data] for n, t in tensors.items() if t.data in self._reference}


def _write_common(common: dict[str, Any], folder: Path) -> None:
    """Write Megatron's common-state file on rank 0.

    It is empty, because only tensors are saved, but Megatron's reader expects it.
    """
    if dist.get_rank() == 0:
        with writing(folder):
            torch.save(common, folder / COMMON_STATE_FNAME)


def _write_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Write the tensors whose main copy this rank has, and on rank 0 the index. A collective.

    torch's writer raises one rank's failure on all ranks. Megatron's own writer is not used: it
    forks workers from a process that may hold CUDA and communication threads, and starts a manager
    that outlives a killed rank.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(flat),
        storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _write_format(folder: Path) -> None:
    """Write the file that names Megatron's format, on rank 0."""
    if dist.get_rank() == 0:
        with writing(folder):
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def check_index(folder: Path) -> None:
    """Check the index of the distributed checkpoint in `folder` before torch reads it.

    The index is a pickle, which can name any function and call it. So only the names that an index
    of tensors needs are allowed.

    Raises:
        CheckpointError: the index cannot be read, or names anything else.
    """
    path = folder / ".metadata"
    try:
        _IndexUnpickler(io.BytesIO(read_whole(path))).load()
    except Exception as error:  # a damaged pickle raises anything
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path} is not an index of tensors ({reason}); set train.resume to another checkpoint"
        ) from None


def rng_state() -> dict[str, Tensor]:
    """This rank's random states by name: torch's, CUDA's, and those of Megatron's tracker."""
    tracked = {f"tracker.{k}": _plain(v) for k, v in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), **tracked}


def set_rng_state(state: Mapping[str, Tensor]) -> None:
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


def _plain(state: Any) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory)


def _by_name(model: dict[str, Any]) -> dict[str, Any]:
    """Sharded tensors of all chunks by "CHUNK.NAME"."""
    return {
        f"{chunk}.{name}": value
        for chunk, state in model.items()
        for name, value in state.items()
        if _is_tensor(value)
    }


def _tensors_only(value: Any) -> Any:
    """Keep sharded tensors as they are; mark everything else as not saved."""
    if isinstance(value, ShardedBase | LocalNonpersistentObject):
        return value
    return LocalNonpersistentObject(value)


def _inner_optimizers(optimizer: Any) -> dict[int, Any]:
    """Megatron's optimizers with parameters, by their index in the chain.

    With experts the chain has two optimizers on every rank. One of them is a stub if all of its
    parameters are frozen; Megatron's own state dict of a chain (0.16.1) fails then.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return {i: one for i, one in enumerate(inner) if not getattr(one, "is_stub_optimizer", False)}


@contextlib.contextmanager
def _step_counts(inner: Iterable[Any]) -> Iterator[None]:
    """Within the block, optimizers without parameters on this rank have a step count too.

    A rank may hold no parameters of a small or frozen stage. With torch's Adam, Megatron's
    distributed optimizer (0.16.1) reads the count from the parameters' states, and fails without
    any.
    """
    empty = [one for one in inner if not one.optimizer.state]
    for one in empty:
        one.optimizer.state["no parameter"] = {"step": torch.tensor(0.0)}
    try:
        yield
    finally:
        for one in empty:
            del one.optimizer.state["no parameter"]


def _load_optimizer(inner: Any, state: dict[str, Any], num_updates: int) -> None:
    """Set an optimizer's state.

    With torch's Adam, Megatron's distributed optimizer (0.16.1) fills every tensor of the
    optimizer's state, the step count too, but the loaded state has no step count. So the count is
    removed before loading and set afterwards.
    """
    per_parameter = state.pop("param_state", None)
    inner.load_state_dict(state)
    if per_parameter is not None:
        for values in inner.optimizer.state.values():
            values.pop("step", None)
        inner.load_parameter_state_from_fully_reshardable(per_parameter)
    _set_update_count(inner, num_updates)


def _set_update_count(inner: Any, num_updates: int) -> None:
    """Set Adam's step count; first allocate its state, which otherwise its first step does."""
    inner.init_state_fn(inner.optimizer, inner.config)
    counts_per_parameter = isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW)
    for group in inner.optimizer.param_groups:
        if not counts_per_parameter:
            group["step"] = num_updates
            continue
        for param in group["params"]:
            inner.optimizer.state[param]["step"] = torch.tensor(float(num_updates))


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
