"""Self attention whose heads differ from those of other layers, or whose values are normalised.

Gemma 4's global layers have wider heads and fewer of keys than its local ones, and no projection to
values: these are the keys before their norm and rotation. Megatron has one width for all layers,
so such a layer gets a copy of the config with its own. Its projection of keys has half the rows,
and its output is completed to what Megatron splits: queries, keys and values of each group.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class Heads(NamedTuple):
    """The heads of a layer."""

    width: int
    """Channels of a head."""
    groups: int
    """Heads of keys and values of the whole layer."""
    keys_as_values: bool = False
    """Whether values are the keys before their norm and rotation."""


class OwnHeads(SelfAttention):  # type: ignore[misc]
    """Megatron's self attention with heads of its own.

    Args:
        heads: None = those of the config.
        norms_values: whether the root mean square of each head's values becomes 1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        heads: Heads | None = None,
        norms_values: bool = False,
        **kwargs: Any,
    ) -> None:
        if heads is not None:
            config = copy.copy(config)
            config.kv_channels = heads.width
            config.num_query_groups = heads.groups
            if heads.keys_as_values:
                build = partial(_with_keys_as_values, submodules.linear_qkv, heads)
                submodules = dataclasses.replace(submodules, linear_qkv=build)
        super().__init__(config, submodules, *args, **kwargs)
        if norms_values:
            hook = partial(_normed_values, config.layernorm_epsilon)
            self.core_attention.register_forward_pre_hook(hook)


def _with_keys_as_values(
    build: Any, heads: Heads, input_size: int, output_size: int, **kwargs: Any
) -> Any:
    """The projection to queries and keys, which gives the keys a second time.

    Args:
        build: makes the projection.
        output_size: channels of queries, keys and values.
        kwargs: Megatron's, with the layer's config.
    """
    layer = build(input_size, output_size - heads.width * heads.groups, **kwargs)
    queries = kwargs["config"].num_attention_heads // heads.groups
    layer.register_forward_hook(partial(_twice, queries + 1, heads.width))
    return layer


def _twice(
    heads: int, width: int, layer: Any, args: tuple[Any, ...], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    projected, bias = output
    by_group = projected.view(*projected.shape[:-1], -1, heads, width)
    return torch.cat([by_group, by_group[..., -1:, :]], dim=-2).flatten(-3), bias


def _normed_values(epsilon: float, core: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, *others = args
    normed = torch.nn.functional.rms_norm(value, value.shape[-1:], eps=epsilon)
    return query, key, normed, *others
