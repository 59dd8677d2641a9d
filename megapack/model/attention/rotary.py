"""Rotary embeddings of a packed row: one gathered table, applied as to a batch of one sequence.

Megatron's rotary embedding for packed rows finds the position of a token in its sample from
`cu_seqlens`, in each layer, for queries and again for keys. Without Transformer Engine it copies
`cu_seqlens` to the host; Transformer Engine's kernel for packed rows (2.11, `fused_rope.cu`) starts
a block for each sample and each position up to the longest one: 100 samples, the longest of 16384
tokens, are 1.6 million blocks for a row of 24576 tokens.

Here the table's lines are gathered once per row and chunk, `table[position_ids]`. A layer's
attention then sees the row as a batch of one sequence, for which Megatron multiplies queries and
keys by the table line by line: one kernel with Transformer Engine, a few of torch without. Only
core attention has to know where samples begin. Three kinds of hooks do this:

    decoder, MTP block: [S, 1, 1, d], the table by position -> [T, d], the table of the row
    self attention: [T, d] -> [T, 1, 1, d], and `OneSequence` instead of the row's description
    core attention: queries, keys and values [T, 1, heads, d] -> [T, heads, d], and the description

Everything in between is Megatron's: interleaved and partial rotation, scaling, YaRN's `mscale`,
layers without rotation.

Shape suffixes: S positions, T tokens of this rank's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megapack.model.attention.packed import row_positions
from megapack.model.head import unwrapped

_Call = tuple[tuple[Any, ...], dict[str, Any]]

# Attribute of a chunk that has the hooks.
_MARK = "_gathers_rotary_tables"


@dataclass(frozen=True)
class OneSequence:
    """A packed row as self attention sees it: a batch of one sequence."""

    packed: PackedSeqParams
    """The row's description, which core attention gets."""
    qkv_format: str = "sbhd"


def gather_rotary_tables(chunks: Sequence[Any]) -> None:
    """Let the chunks gather their rotary table once per row, where `gathers` is true.

    It acts on rows whose description has positions (`packed.with_params`); others take Megatron's
    path. Idempotent.
    """
    for chunk in map(unwrapped, chunks):
        if hasattr(chunk, _MARK) or not gathers(chunk):
            continue
        setattr(chunk, _MARK, True)
        for block in (chunk.decoder, getattr(chunk, "mtp", None)):
            if block is not None:
                block.register_forward_pre_hook(_gather, with_kwargs=True)
        for module in chunk.modules():
            if isinstance(module, SelfAttention):
                module.register_forward_pre_hook(_enter_one_sequence, with_kwargs=True)
                core = module.core_attention
                core.register_forward_pre_hook(_enter_packed, with_kwargs=True)
                core.register_forward_hook(_leave_packed, with_kwargs=True)


def gathers(chunk: Any) -> bool:
    """Whether a chunk's rotary table can be gathered by position.

    It needs a table of one line per position (Megatron's RotaryEmbedding or YaRN; not multimodal
    RoPE), Megatron's TransformerBlock and TransformerLayer, and Megatron's self attention in every
    layer. Subclasses count as long as they keep `forward`. Multi-latent attention has a table of
    its own.
    """
    rotary = type(getattr(chunk, "rotary_pos_emb", None))
    attentions = [module for module in chunk.modules() if isinstance(module, Attention)]
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    return (
        getattr(rotary, "forward", None) in (RotaryEmbedding.forward, YarnRotaryEmbedding.forward)
        and getattr(type(getattr(chunk, "decoder", None)), "forward", None)
        is TransformerBlock.forward
        and all(type(layer).forward is TransformerLayer.forward for layer in layers)
        and all(isinstance(module, SelfAttention) for module in attentions)
        and all(type(module).forward is SelfAttention.forward for module in attentions)
    )


def _gather(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    table = kwargs.get("rotary_pos_emb")
    params = kwargs.get("packed_seq_params")
    if table is None or params is None:
        return None
    positions_T = row_positions(params)
    # A table of another length is one that a subclass of GPTModel has made for itself.
    if positions_T is None or table.shape[0] != params.max_seqlen_q:
        return None
    row_table_Td = table.flatten(1).index_select(0, positions_T)
    return args, {**kwargs, "rotary_pos_emb": row_table_Td}


def _enter_one_sequence(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    table = kwargs.get("rotary_pos_emb")
    # Two dimensions mark the table of a row; unlike an attribute they survive recomputation.
    if table is None or table.dim() != 2:
        return None
    as_one = {
        "rotary_pos_emb": table[:, None, None],
        "packed_seq_params": OneSequence(kwargs["packed_seq_params"]),
    }
    return args, {**kwargs, **as_one}


def _enter_packed(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, OneSequence):
        return None
    query, key, value, *others = args
    packed = (query.squeeze(1), key.squeeze(1), value.squeeze(1), *others)
    return packed, {**kwargs, "packed_seq_params": params.packed}


def _leave_packed(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
    """[T, heads * d] -> [T, 1, heads * d], which self attention returns in both cases."""
    params = kwargs.get("packed_seq_params")
    is_packed = params is not None and params.qkv_format == "thd"
    return out.flatten(1).unsqueeze(1) if is_packed else out
