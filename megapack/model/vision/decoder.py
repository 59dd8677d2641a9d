"""Hooks that put features of images into a decoder: at its input, and after its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention.rotary import gathers
from megapack.model.attention.row import row_view
from megapack.model.head import layer_letters, unwrapped
from megapack.model.mtp import num_depths

# Attribute of a chunk: the number of levels that its hooks read.
_MARK = "_levels_of_images"


def read_images(chunks: Sequence[Any], num_levels: int) -> None:
    """Let the chunks read features of images from rows that have some. Idempotent.

    Args:
        chunks: of this rank, wrapped or not.
        num_levels: see `VisionTower`.

    Raises:
        ConfigError: a chunk that megapack cannot give features to.
    """
    for chunk in map(unwrapped, chunks):
        before = getattr(chunk, _MARK, 0)
        if before >= num_levels:
            continue
        if not gathers(chunk):
            raise ConfigError(
                f"{type(chunk).__name__} with images needs Megatron's rotary embedding, self "
                "attention and TransformerLayer in every layer; build it with "
                "megapack.gpt.build_model"
            )
        if chunk.config.rotary_interleaved:
            raise ConfigError(
                "images with rotary_interleaved, which turns other pairs of channels than models "
                "with images do; set rotary_interleaved=False"
            )
        if num_depths(chunk.config):
            raise ConfigError(
                "images with multi-token prediction, which would embed image tokens as text; set "
                "mtp_num_layers to null"
            )
        blocks = chunk.config.num_layers if layer_letters(chunk) is None else 0
        if blocks < num_levels - 1:
            raise ConfigError(
                f"{num_levels - 1} levels of DeepStack for {blocks} layers of attention and an "
                "MLP; give the decoder one such layer per level"
            )
        setattr(chunk, _MARK, num_levels)
        if chunk.pre_process and not before:
            chunk.decoder.register_forward_pre_hook(_replace_embeddings, with_kwargs=True)
        for layer in chunk.decoder.layers:
            if max(before, 1) <= layer.layer_number < num_levels:
                add = partial(_add_level, layer.layer_number)
                layer.register_forward_hook(add, with_kwargs=True)


def levels_of(chunks: Sequence[Any], num_levels: int) -> list[int]:
    """The levels of features that chunks read."""
    found = set()
    for chunk in map(unwrapped, chunks):
        found |= {0} if chunk.pre_process else set()
        found |= {layer.layer_number for layer in chunk.decoder.layers}
    return [level for level in range(num_levels) if level in found]


def _replace_embeddings(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    images = _images(kwargs)
    if images is None:
        return None
    # Megatron's models give the hidden states by name.
    return args, {**kwargs, "hidden_states": images.features.put(0, kwargs["hidden_states"])}


def _add_level(
    level: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    images = _images(kwargs)
    if images is None:
        return None
    if isinstance(output, Tensor):
        return images.features.put(level, output)
    hidden, *others = output
    return images.features.put(level, hidden), *others


def _images(kwargs: dict[str, Any]) -> Any:
    """The row's images; None of a row without images."""
    params = kwargs.get("packed_seq_params")
    return None if params is None else row_view(params).images
