"""A chunk's tensors with their names and places in the whole model, which no layout changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megapack.model.head import unwrapped

# Each layer has its number in the whole model in its name, and optimizer state is by parameter, so
# the names do not depend on the layout.
METADATA = {
    "non_homogeneous_layers": True,
    "chained_optim_avoid_prefix": True,
}


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


def is_tensor(value: Any) -> bool:
    """Whether an entry of a sharded state dict is a tensor."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)
