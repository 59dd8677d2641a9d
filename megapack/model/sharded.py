"""A chunk's tensors with their names and places in the whole model, which no layout changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megapack.model.head import unwrapped

# Each layer has its number in the whole model in its name, and optimizer state is by parameter, so
# the names do not depend on the layout.
METADATA = {"non_homogeneous_layers": True, "chained_optim_avoid_prefix": True}


def sharded_tensors(chunk: Any) -> dict[str, Any]:
    """Megatron's sharded state dict of a chunk, without the entries that are not tensors.

    Returns:
        By local name: a ShardedTensor, or a ShardedTensorFactory for a parameter that is several
        tensors.
    """
    state = unwrapped(chunk).sharded_state_dict(metadata=dict(METADATA))
    return {name: value for name, value in state.items() if is_tensor(value)}


def saved_blocks(chunk: Any) -> Iterator[ShardedTensor]:
    """The blocks of the whole model's tensors that a chunk holds, as they are saved.

    Each has its values as a view of a parameter or buffer. A gate and an up projection that are
    stored as one are two blocks.
    """
    for value in sharded_tensors(chunk).values():
        if isinstance(value, ShardedTensor):
            yield value
        else:
            yield from nested_values({"parts": value.build()})


class Sharded:
    """A module of ours, whose weights are in Megatron's checkpoints as those of its own modules."""

    splits: ClassVar[Mapping[str, int]] = {}
    """Parameter -> the dimension that tensor-parallel ranks split; all have others whole."""

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """As Megatron's modules have it."""
        groups = {"dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
        if self.splits:
            # Megatron-Core sets the group of its modules since 0.19.
            own = getattr(self, "tp_group", None)
            groups["tp_group"] = own or get_tensor_model_parallel_group()
        state = self.state_dict(prefix="", keep_vars=True)
        splits = dict(self.splits)
        return make_sharded_tensors_for_checkpoint(state, prefix, splits, sharded_offsets, **groups)


def is_tensor(value: Any) -> bool:
    """Whether an entry of a sharded state dict is a tensor."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)
