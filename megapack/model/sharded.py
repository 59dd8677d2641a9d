"""A chunk's tensors with their names and places in the whole model, which no layout changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

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


def own_sharded_tensors(
    module: Any, split: dict[str, int], prefix: str, sharded_offsets: Any, metadata: Any
) -> dict[str, Any]:
    """Megatron's `sharded_state_dict` of a module that is ours.

    Args:
        split: parameter -> the dimension that tensor-parallel ranks split; all have others whole.
        prefix, sharded_offsets, metadata: those of `sharded_state_dict`.
    """
    groups = {"dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
    if split:
        # Megatron-Core sets the group of its modules since 0.19.
        own = getattr(module, "tp_group", None)
        groups["tp_group"] = own or get_tensor_model_parallel_group()
    return make_sharded_tensors_for_checkpoint(  # type: ignore[no-any-return]
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        split,
        sharded_offsets,
        **groups,
    )


def is_tensor(value: Any) -> bool:
    """Whether an entry of a sharded state dict is a tensor."""
    return isinstance(value, ShardedTensor | ShardedTensorFactory)
