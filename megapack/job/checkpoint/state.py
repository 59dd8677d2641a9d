"""The tensors of a run in Megatron's distributed checkpoint format, which loads on any layout.

Only tensors are saved, each under its name in the whole model. The other values of an optimizer's
state dict (learning rates, betas) follow from the config and the number of updates. The format's
index is a pickle, which is checked before torch reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megapack.errors import CheckpointError
from megapack.job.checkpoint.blocks import own_blocks
from megapack.job.checkpoint.index import read_fault
from megapack.job.checkpoint.writer import StateWriter
from megapack.model.head import unwrapped
from megapack.model.overlap import finish_param_gathers
from megapack.model.sharded import is_tensor, sharded_tensors
from megapack.ranks.agree import agree


@dataclass(eq=False)
class RunState:
    """Model, optimizer, reference weights and critic of one rank, as a sharded state dict."""

    chunks: Sequence[Any]
    """This rank's model chunks, wrapped in DDP."""
    optimizer: Any
    """Megatron's, for these chunks."""
    reference: Mapping[Tensor, Tensor] | None = None
    """The reference policy's value of each parameter; `load` fills these tensors in place."""
    critic: RunState | None = None
    """The critic's model and optimizer; its tensors are saved under the model's names after
    "critic."."""

    def __post_init__(self) -> None:
        # Which rank writes which replicated tensor. The same in every save of a run.
        self._writers_of: ShardDistribution | None = None

    def writer(self, folder: Path, *, num_threads: int, device: torch.device) -> StateWriter:
        """A writer of all tensors into an empty folder that all ranks see. A collective.

        Args:
            num_threads: threads of this rank that write.
            device: see `agree`.
        """
        self._finish_param_gathers()
        sharded = agree(self._sharded, device=device)
        tensors, _ = save_preprocess(sharded, validate_access_integrity=False)
        self._spread(tensors)
        return StateWriter(tensors, folder, num_threads=num_threads, device=device)

    def load(
        self,
        folder: Path,
        *,
        num_updates: int,
        num_critic_updates: int = 0,
        with_reference: bool,
        device: torch.device,
    ) -> None:
        """Read what a writer wrote, on any layout. A collective.

        Each rank reads the tensors that it holds, and of the distributed optimizer's state its own
        slices.

        Args:
            num_updates: Adam's step count.
            num_critic_updates: that of the critic's.
            with_reference: load the reference's weights too; the folder must have them.
            device: see `agree`.

        Raises:
            CheckpointError, ScheduleError: on every rank: a tensor is missing, has another shape,
                or cannot be read.
        """
        self._set_update_counts(num_updates)
        if self.critic is not None:
            self.critic._set_update_counts(num_critic_updates)
        sharded = agree(self._sharded, device=device)
        if not with_reference:
            sharded.pop("reference", None)
        loaded = agree(lambda: _read(sharded, folder), device=device)
        self._fill(loaded)
        if self.critic is not None:
            self.critic._fill(loaded["critic"])

    def _set_update_counts(self, num_updates: int) -> None:
        for one in _inner_optimizers(self.optimizer).values():
            _set_update_count(one, num_updates)

    def _fill(self, loaded: dict[str, Any]) -> None:
        """Take over what was read into a sharded state dict."""
        for v, chunk in enumerate(self.chunks):
            # Not strict, because extra states (FP8 scales) are not saved. Tensors are complete.
            unwrapped(chunk).load_state_dict(loaded[f"model{v}"], strict=False)
        for index, one in _inner_optimizers(self.optimizer).items():
            # The blocks of a distributed one are views of its tensors, so they were read in place.
            if not _is_distributed(one):
                for number, (_, _, value) in enumerate(_whole_tensors(one)):
                    value.copy_(loaded["optimizer"][index][number])
        for name, value in loaded.get("reference", {}).items():
            self._reference_tensors()[name].data.copy_(value)

    def _sharded(self) -> dict[str, Any]:
        model = self._model()
        sharded: dict[str, Any] = dict(model)
        inner = _inner_optimizers(self.optimizer)
        if inner:
            sharded["optimizer"] = {
                index: _sharded_optimizer(one, model) for index, one in inner.items()
            }
        if self.reference is not None:
            tensors = _by_name(model)
            sharded["reference"] = {
                name: make_sharded_optimizer_tensor(tensors[name], value, "reference")
                for name, value in self._reference_tensors(model).items()
            }
        if self.critic is not None:
            sharded["critic"] = self.critic._sharded()
            add_prefix_for_sharding(sharded["critic"], "critic.")
        return sharded

    def _finish_param_gathers(self) -> None:
        finish_param_gathers(self.chunks)
        if self.critic is not None:
            self.critic._finish_param_gathers()

    def _spread(self, tensors: dict[str, Any]) -> None:
        """Spread the writing of replicated tensors over the ranks that have them.

        Without this, the first of a tensor's replicas writes it: with tp2 and dp32 two of 64 ranks
        would write all weights. Every replica of a stage is in the stage's group over tp, cp and
        dp, experts' too. The distributed optimizer's state has no replicas over dp.
        """
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        replicated = self._replicated(tensors)
        if self._writers_of is None:
            self._writers_of = determine_main_replica_uniform_distribution(replicated, group)
        distribute_main_replicas_with_precomputed_distribution(replicated, group, self._writers_of)

    def _replicated(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors of which other ranks have replicas."""
        own = {
            name: value for name, value in tensors.items() if name not in ("optimizer", "critic")
        }
        own["optimizer"] = {
            index: tensors.get("optimizer", {}).get(index, {})
            for index, one in _inner_optimizers(self.optimizer).items()
            if not _is_distributed(one)
        }
        if self.critic is not None:
            own["critic"] = self.critic._replicated(tensors["critic"])
        return own

    def _model(self) -> dict[str, Any]:
        return {f"model{v}": sharded_tensors(chunk) for v, chunk in enumerate(self.chunks)}

    def _reference_tensors(self, model: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """The reference's tensors under the model's names."""
        assert self.reference is not None
        tensors = _by_name(self._model() if model is None else model)
        return {n: self.reference[t.data] for n, t in tensors.items() if t.data in self.reference}


def _read(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the tensors that a sharded state dict asks for; a collective in Megatron-Core 0.16."""
    tensors, kept, factories = load_preprocess(sharded)
    try:
        loaded = TorchDistLoadShardedStrategy().load(tensors, folder)
    except (Exception, CheckpointException) as error:
        # torch raises CheckpointException, a BaseException, if any rank failed.
        raise CheckpointError(
            f"{folder} cannot be loaded ({read_fault(error)}); set train.resume to an earlier "
            "checkpoint"
        ) from error
    merge(loaded, kept)
    return apply_factory_merges(loaded, factories)


def _is_distributed(inner: Any) -> bool:
    return isinstance(inner, DistributedOptimizer)


def _sharded_optimizer(inner: Any, model: dict[str, Any]) -> dict[int, Any]:
    """An optimizer's numbered tensors; of a distributed one, its blocks."""
    if _is_distributed(inner):
        return dict(enumerate(own_blocks(inner, model)))
    named = {id(one.data): one for one in nested_values(dict(model))}
    return {
        number: make_sharded_optimizer_tensor(named[id(param)], value, f"optimizer.state.{name}")
        for number, (param, name, value) in enumerate(_whole_tensors(inner))
    }


def _whole_tensors(inner: Any) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Each parameter's main weights and moments in an optimizer that is not distributed.

    Megatron's own state dict (0.16 to 0.19) counts no parameters that are fp32 in a bf16 model, and
    would give those after them the state of others.

    Yields:
        The parameter, the name of the values, and the values.
    """
    for param, main in _main_weights(inner):
        if param is not main:
            yield param, "fp32_param", main.detach()
        for name, value in inner.optimizer.state[main].items():
            if name != "step":
                yield param, name, value


def _main_weights(inner: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of an optimizer that is not distributed, and what the optimizer updates: the
    parameter itself if it is fp32."""
    groups = (getattr(inner, name, ()) for name in ("float16_groups", "fp32_from_float16_groups"))
    param_of = {
        main: param
        for params, mains in zip(*groups, strict=True)
        for param, main in zip(params, mains, strict=True)
    }
    for main in (main for group in inner.optimizer.param_groups for main in group["params"]):
        yield param_of.get(main, main), main


def _by_name(model: dict[str, Any]) -> dict[str, Any]:
    """Sharded tensors of all chunks by "CHUNK.NAME"."""
    return {
        f"{chunk}.{name}": value
        for chunk, state in model.items()
        for name, value in state.items()
        if is_tensor(value)
    }


def _inner_optimizers(optimizer: Any) -> dict[int, Any]:
    """Megatron's optimizers with parameters, by their index in the chain.

    With experts the chain has two optimizers on every rank. One of them is a stub if all of its
    parameters are frozen; Megatron's own state dict of a chain (0.16.1) fails then.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return {i: one for i, one in enumerate(inner) if not getattr(one, "is_stub_optimizer", False)}


def _set_update_count(inner: Any, num_updates: int) -> None:
    """Set Adam's step count; first allocate the state, which otherwise the first step does."""
    inner.init_state_fn(inner.optimizer, inner.config)
    counts_per_parameter = isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW)
    for group in inner.optimizer.param_groups:
        if not counts_per_parameter:
            group["step"] = num_updates
            continue
        for param in group["params"]:
            inner.optimizer.state[param]["step"] = torch.tensor(float(num_updates))
