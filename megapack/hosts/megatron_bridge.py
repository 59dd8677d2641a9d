"""Megatron-Bridge's recipes: planned steps in `pretrain` and `finetune`.

    patching.apply("megatron_bridge")      # above every import of megatron.bridge
    forward_step = megatron_bridge.PlannedStep(max_tokens_per_gpu=16384)
    finetune(config, forward_step)

Bridge packs a data set once, into rows of one length, and trains on M such rows per rank and step.
A planned step takes the samples out of a step's rows again and plans them over all ranks. Any other
forward step runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapack.errors import ConfigError
from megapack.hosts import megatron_lm, patching

# Where `split_deepstack_embs` stands in Bridge.
_VISION = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils"

# Where a row's samples start. `cu_seqlens_q` leaves out what `pad_seq_to_mult` added to samples, so
# the first one has the places in the row.
_BOUNDS = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens")


class PlannedStep(megatron_lm.PlannedStep):
    """A forward step for Bridge that plans, packs and runs each step.

    It draws the rows of Bridge's step, cuts packed rows into their samples, and plans these over
    all ranks. Arguments as in `megatron_lm.PlannedStep`. A sample counts one token more than in
    Bridge's packs: its last label.
    """

    _patch = ("megatron_bridge", "megatron.bridge")
    # Bridge always passes groups and a communicator: Megatron's own unless it made them.
    _refused = ("adjust_tensor_shapes_fn", "collect_non_loss_data", "force_all_reduce")
    _refusal = (
        "Bridge passes {}, which planned steps do not support; turn off the feature that needs it "
        "(distillation, non-loss data), or use Bridge's own forward step"
    )

    def check_call(self, step: Mapping[str, Any]) -> None:
        """Raise ConfigError if the recipe passes its schedule what planned steps do not support."""
        from megatron.core import parallel_state

        super().check_call(step)
        if not parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "dist.use_decentralized_pg=True: planned steps need Megatron's global process "
                "groups; set it to False"
            )

    def run(
        self, data_iterator: Any, model: Any, num_items: int, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Run one step on all ranks; see `megatron_lm.PlannedStep.run`."""
        first = data_iterator[0] if isinstance(data_iterator, Sequence) else data_iterator
        items = None if first is None else map(without_fill, first)
        return super().run(items, model, num_items, forward_only)


def without_fill(item: Mapping[str, Any]) -> dict[str, Any]:
    """A row of Bridge's packed data set whose `cu_seqlens` end with its last sample.

    Bridge fills its bounds up with -1 or the row's length, and adds the row's padding as one more
    sample: 0, 5, 9, 16, -1 for samples of 5 and 4 tokens in a row of 16 becomes 0, 5, 9.

    Args:
        item: tensors [1, S], the bounds [1, N] and `token_count`, the row's real tokens; a row
            without bounds is returned as it is.
    """
    for name in _BOUNDS:
        if item.get(name) is not None:
            bounds = item[name]
            is_sample = (bounds >= 0) & (bounds <= _token_count(item))
            return {**item, "cu_seqlens": bounds[is_sample]}
    return dict(item)


def split_deepstack_embs(
    visual_pos_masks: Any, deepstack_visual_embeds: Any, *sizes: int, **named: Any
) -> Any:
    """Bridge's split of DeepStack's features, whose gradients tensor-parallel ranks add up.

    Under sequence parallelism a rank takes the features of its own tokens out of those of all. The
    patch `bridge_deepstack` adds up what their gradients are on each rank; Bridge leaves it out.
    """
    own = patching.original(f"{_VISION}.split_deepstack_embs")
    if deepstack_visual_embeds is not None and named.get("sequence_parallel", True):
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as whole

        deepstack_visual_embeds = [whole(features) for features in deepstack_visual_embeds]
    return own(visual_pos_masks, deepstack_visual_embeds, *sizes, **named)


def _token_count(item: Mapping[str, Any]) -> int:
    count = item.get("token_count")
    if count is None:
        return int(item["tokens"].shape[-1])
    return int(count[0]) if isinstance(count, Sequence) else int(count)
