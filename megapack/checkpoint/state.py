"""The tensors of a run in Megatron's distributed checkpoint format, which fits any layout.

Only tensors go in, each under its name in the whole model. What else an optimizer's state dict
holds (learning rates, betas) follows from the config and the number of updates, on any layout.
The format's index is a pickle, which is checked before torch reads it.
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
from megapack.ranks.agree import agree

# Every layer under its own number, and optimizer state by parameter: nothing of the layout.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
# What an index of tensors names. The metadata of entries that are pickles themselves is left out.
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
        reference: the reference policy's value of each parameter, if there is one; `load` fills
            these tensors in place.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        reference: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._reference = chunks, optimizer, reference

    def num_bytes(self) -> int:
        """Bytes that this rank would write, about: tensors of which it holds the main copy."""
        model = [t for t in nested_values(self._model()) if _is_tensor(t)]
        mine = sum(t.data.nbytes for t in model if is_main_replica(t.replica_id))
        # Adam's two moments and the main weights, all in fp32.
        adam = sum(t.data.numel() * 12 for t in model if is_main_replica(t.replica_id))
        return mine * (2 if self._reference else 1) + adam

    def save(self, folder: Path, *, device: torch.device) -> None:
        """Write into an empty folder, which all ranks see. A collective.

        Args:
            device: see `agree`.

        Raises:
            CheckpointError: on every rank, where one could not write (a full disk).
        """
        # Gathers within data-parallel groups: an error must reach the ranks of the others too.
        sharded = agree(lambda: self._sharded(is_loading=False), device=device)
        # The steps of Megatron's own `save`, in which the first rank writes two small files: an
        # error there would leave the others waiting.
        tensors, common = save_preprocess(sharded)
        agree(lambda: _write_common(common, folder), device=device)
        try:
            _write_tensors(tensors, folder)
        except torch_checkpoint.CheckpointException as error:
            failed = {rank: " ".join(str(why[0]).split()) for rank, why in error.failures.items()}
            raise CheckpointError(
                f"{folder} cannot be written (by rank: {failed}); earlier checkpoints stand: see "
                "that the disk has room and takes writes, and resume with train.resume=auto"
            ) from error
        agree(lambda: _write_format(folder), device=device)

    def load(self, folder: Path, *, num_updates: int, with_reference: bool) -> None:
        """Read what `save` wrote, on any layout. A collective.

        Args:
            num_updates: Adam's step count.
            with_reference: whether the reference's weights are in the folder.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or cannot be read; or the
                folder's index holds more than an index does.
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
            # The second is no Exception: it is torch's for what failed on some rank.
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{folder} cannot be loaded ({type(error).__name__}: {reason}); set train.resume "
                "to an earlier checkpoint"
            ) from error
        for v, chunk in enumerate(self._chunks):
            # Not strict: no tensor was missed, and extra states (FP8 scales) are not in it.
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
        """The reference's tensors by the model's names."""
        assert self._reference is not None
        tensors = _by_name(self._model() if model is None else model)
        return {n: self._reference[t.data] for n, t in tensors.items() if t.data in self._reference}


def _write_common(common: dict[str, Any], folder: Path) -> None:
    """On the first rank what is no tensor, which is nothing; Megatron's reader wants the file."""
    if dist.get_rank() == 0:
        with writing(folder):
            torch.save(common, folder / COMMON_STATE_FNAME)


def _write_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """This rank's main copies, and on the first rank the index of all. A collective.

    Megatron's own writer forks workers from a process that may hold CUDA and communication
    threads, and starts a manager that outlives a rank that is killed. torch's writer also brings
    one rank's failure to all of them.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(flat),
        storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _write_format(folder: Path) -> None:
    """On the first rank the name of Megatron's format."""
    if dist.get_rank() == 0:
        with writing(folder):
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def check_index(folder: Path) -> None:
    """Look through the index of the distributed checkpoint in `folder` before torch reads it.

    torch keeps it as a pickle, which may name any function and call it. A checkpoint of someone
    else must not: only names that an index of tensors needs are let through.

    Raises:
        CheckpointError: it cannot be read, or names what an index of tensors does not need.
    """
    path = folder / ".metadata"
    try:
        _IndexUnpickler(io.BytesIO(read_whole(path))).load()
    except Exception as error:  # a damaged pickle raises anything
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path} is no index of tensors ({reason}); set train.resume to another checkpoint"
        ) from None


def rng_state() -> dict[str, Tensor]:
    """This rank's random states by name: torch's, CUDA's and Megatron's tracker."""
    tracked = {f"tracker.{k}": _plain(v) for k, v in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), **tracked}


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Put back what `rng_state` returned on a rank of the same layout."""
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
    """Sharded tensors of all chunks by chunk and name."""
    return {
        f"{chunk}.{name}": value
        for chunk, state in model.items()
        for name, value in state.items()
        if _is_tensor(value)
    }


def _tensors_only(value: Any) -> Any:
    """Leave sharded tensors; keep everything else on this rank."""
    if isinstance(value, ShardedBase | LocalNonpersistentObject):
        return value
    return LocalNonpersistentObject(value)


def _inner_optimizers(optimizer: Any) -> dict[int, Any]:
    """Megatron's optimizers that hold parameters, by their place in the chain.

    A chain of experts and all else has both places on every rank, also where one is empty because
    all of its parameters are frozen. Megatron's own state dict of a chain (0.16.1) fails there.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return {i: one for i, one in enumerate(inner) if not getattr(one, "is_stub_optimizer", False)}


@contextlib.contextmanager
def _step_counts(inner: Iterable[Any]) -> Iterator[None]:
    """Within the block optimizers without parameters on this rank have a step count, too.

    A rank may hold none of a small or frozen stage. With torch's Adam, Megatron's distributed
    optimizer (0.16.1) reads the count from the parameters' states, and fails where there are none.
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

    With torch's Adam, Megatron's distributed optimizer (0.16.1) looks for a step count among the
    tensors that it fills, and leaves it out of those that it reads: it is put in afterwards.
    """
    per_parameter = state.pop("param_state", None)
    inner.load_state_dict(state)
    if per_parameter is not None:
        for values in inner.optimizer.state.values():
            values.pop("step", None)
        inner.load_parameter_state_from_fully_reshardable(per_parameter)
    _set_update_count(inner, num_updates)


def _set_update_count(inner: Any, num_updates: int) -> None:
    """Make Adam's state, which is made by its first step only, and set its count of steps."""
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
