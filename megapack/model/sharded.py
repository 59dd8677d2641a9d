"""A chunk's tensors with their names and places in the whole model, which no layout changes."""

from __future__ import annotations

from typing import Any

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


def is_tensor(value: Any) -> bool:
    """Whether an entry of a sharded state dict is a tensor."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)
