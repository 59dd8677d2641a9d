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
    self attention: [T, d] -> [T, 1, 1, d], and a description of one sequence instead of the row's
        (`row.seen_as_one`); of several tables (`rotary_tables`) the layer's
    core attention: queries, keys and values [T, 1, heads, d] -> [T, heads, d], and the description

Everything in between is Megatron's: interleaved and partial rotation, scaling, YaRN's `mscale`,
layers without rotation.

Multi-latent attention makes a table in each layer, and applies it to packed rows by `cu_seqlens`,
which it reads on the host: per layer once for queries and once for keys, and with a table of the
whole row once more for each sample. On a GPU each of these reads waits for all work before it. So
the layer sees the row as one long sequence, with `cu_seqlens` on the host and a table that has the
lines of the row's tokens. After 0.19 Megatron-Core finds positions on the device, and `cu_seqlens`
are there. Megatron takes a table as long as the row line by line, and from it the zigzag slice of
its own context-parallel rank, where this rank's lines are put. That gives right
positions, too, where they do not follow from `cu_seqlens`: where samples share prefixes or are in
pieces, and where several DP ranks share the row. Core attention gets the true description.

Shape suffixes: S positions, T tokens of this rank's row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megapack.errors import ScheduleError
from megapack.model.attention.indexer import SparseLatentAttention
from megapack.model.attention.rotary_tables import RotaryTables, tables_of
from megapack.model.attention.row import row_view, seen_as_one, whole_row
from megapack.model.head import unwrapped

READS_ON_HOST = "max_seqlen" not in signature(rope_utils.apply_rotary_pos_emb).parameters
"""Whether Megatron reads `cu_seqlens` of packed rows on the host; not after 0.19."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]

# Embeddings whose table has one line per position.
_TABLES = (RotaryEmbedding.forward, YarnRotaryEmbedding.forward)

# Blocks that hand the table and the row's description to each layer, and layers that hand both on.
_BLOCKS = [TransformerBlock.forward]
_LAYERS = [TransformerLayer.forward]
with contextlib.suppress(ImportError):
    # Megatron-Core since 0.18, and after 0.19.
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    _BLOCKS.append(HybridStack.forward)
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    _LAYERS.append(HyperConnectionTransformerLayer.forward)

# Attribute of a chunk that has the hooks.
_MARK = "_gathers_rotary_tables"


def gather_rotary_tables(chunks: Sequence[Any]) -> None:
    """Let the chunks gather their rotary table once per row, where `gathers` is true.

    Layers of multi-latent attention gather theirs in each layer, without `apply_rope_fusion`. It
    acts on rows whose description has positions (`packed.row_params`); others take Megatron's
    path. Idempotent.
    """
    for chunk in map(unwrapped, chunks):
        if hasattr(chunk, _MARK):
            continue
        setattr(chunk, _MARK, True)
        for attention in filter(_is_latent, chunk.modules()):
            _LatentTable().hook(attention)
        if not gathers(chunk):
            continue
        tables = tables_of(chunk)
        for block in (chunk.decoder, getattr(chunk, "mtp", None)):
            if block is not None:
                block.register_forward_pre_hook(partial(_gather, tables), with_kwargs=True)
        for module in chunk.modules():
            if isinstance(module, SelfAttention):
                enter = partial(_enter_one_sequence, tables)
                module.register_forward_pre_hook(enter, with_kwargs=True)
                core = module.core_attention
                core.register_forward_pre_hook(_enter_packed, with_kwargs=True)
                core.register_forward_hook(_leave_packed, with_kwargs=True)


def gathers(chunk: Any) -> bool:
    """Whether a chunk's rotary table can be gathered by position.

    It needs a table of one line per position (Megatron's RotaryEmbedding or YaRN; not multimodal
    RoPE), Megatron's TransformerBlock or HybridStack, TransformerLayer, and self attention in every
    layer with attention. Subclasses count as long as they keep `forward`. Multi-latent attention
    has a table of its own.
    """
    rotary = type(getattr(chunk, "rotary_pos_emb", None))
    attentions = [module for module in chunk.modules() if isinstance(module, Attention)]
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    return (
        getattr(rotary, "forward", None) in _TABLES
        and getattr(type(getattr(chunk, "decoder", None)), "forward", None) in _BLOCKS
        and all(type(layer).forward in _LAYERS for layer in layers)
        and all(isinstance(module, SelfAttention) for module in attentions)
        and all(type(module).forward is SelfAttention.forward for module in attentions)
    )


def position_obstacle(chunk: Any) -> str | None:
    """What finds positions from `cu_seqlens`, which are wrong for tokens after a shared prefix or a
    piece, and for those of a row over several DP ranks; None if nothing does."""
    attentions = [module for module in chunk.modules() if isinstance(module, Attention)]
    embedding = getattr(chunk, "position_embedding_type", None)
    if gathers(chunk) or embedding in _WITHOUT_ROTARY or _lacks_attention(chunk):
        return None
    if attentions and all(map(_is_latent, attentions)):
        is_fused = attentions[0].config.apply_rope_fusion
        return "apply_rope_fusion=True in multi-latent attention" if is_fused else None
    others = {type(module).__name__ for module in attentions} - {"SelfAttention"}
    names = ", ".join(sorted(others)) or type(chunk).__name__
    return f"{names} with position_embedding_type={embedding!r}"


def _lacks_attention(chunk: Any) -> bool:
    """Whether a chunk has no layers, or none but MLPs and mixers of a hybrid model."""
    layers = getattr(getattr(chunk, "decoder", None), "layers", None)
    if layers is None or getattr(chunk, "mtp", None) is not None:
        return False
    return all(
        hasattr(layer, "mixer") or isinstance(getattr(layer, "self_attention", None), IdentityOp)
        for layer in layers
    )


# Embeddings that take the row's position ids, or have no positions.
_WITHOUT_ROTARY = ("learned_absolute", "none")


def _is_latent(module: Any) -> bool:
    """Whether it is Megatron's multi-latent self attention, or a subclass that rotates as it."""
    return (
        isinstance(module, MLASelfAttention)
        and type(module).forward is MLASelfAttention.forward
        and type(module).get_query_key_value_tensors in _ROTATIONS
        and type(module.rotary_pos_emb).forward in _TABLES
    )


# What rotates queries and keys of multi-latent attention by the layer's table.
_ROTATIONS = (
    MLASelfAttention.get_query_key_value_tensors,
    SparseLatentAttention.get_query_key_value_tensors,
)


class _LatentTable:
    """The rotary table of one layer of multi-latent attention."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None

    def hook(self, attention: Any) -> None:
        attention.register_forward_pre_hook(self._enter, with_kwargs=True)
        attention.rotary_pos_emb.register_forward_hook(self._gather)
        attention.core_attention.register_forward_pre_hook(_leave_latent, with_kwargs=True)

    def _enter(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        params = kwargs.get("packed_seq_params")
        self._positions = None
        # Megatron's fused kernel reads `cu_seqlens` on the device.
        if params is None or attention.config.apply_rope_fusion:
            return None
        row = row_view(params)
        if row.positions_T is None:
            return None
        if row.latent is None:
            row.latent = latent_row(params, row.positions_T, attention.pg_collection.cp)
        as_one, self._positions = row.latent
        return args, {**kwargs, "packed_seq_params": as_one}

    def _gather(self, rotary: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self._positions is None:
            return output
        if isinstance(output, tuple):
            # YaRN's table and its scale.
            return output[0].index_select(0, self._positions), *output[1:]
        return output.index_select(0, self._positions)


def latent_row(
    params: PackedSeqParams, positions_T: Tensor, cp_group: Any
) -> tuple[PackedSeqParams, Tensor]:
    """A row as multi-latent attention sees it: one sequence, whose slice this rank has.

    Args:
        params: the true description.
        positions_T: the position of this rank's tokens in their samples.
        cp_group: the context-parallel ranks of the layer, over which Megatron slices the sequence;
            fewer than those that share the row if it lies over several DP ranks.

    Returns:
        The description, with `cu_seqlens` where Megatron reads them, and int64 [tokens of the
        sequence]: the position in its sample of each line's token; 0 in the slices of other ranks.
    """
    ranks, rank = cp_group.size(), cp_group.rank()
    lines = positions_T
    if ranks > 1:
        # With 2 ranks, the first has parts 0 and 3 of 4, and the second 1 and 2.
        lines = positions_T.new_zeros(ranks * positions_T.numel())
        first, last = positions_T.chunk(2)
        parts = lines.chunk(2 * ranks)
        parts[rank].copy_(first)
        parts[2 * ranks - 1 - rank].copy_(last)
    tokens = lines.numel()
    device = "cpu" if READS_ON_HOST else positions_T.device
    ends = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    given = {name: ends for name in names if getattr(params, name) is not None}
    return seen_as_one(dataclasses.replace(params, **given), params), lines


def _leave_latent(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    whole = whole_row(kwargs.get("packed_seq_params"))
    return None if whole is None else (args, {**kwargs, "packed_seq_params": whole})


def _gather(
    tables: RotaryTables | None, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    table = kwargs.get("rotary_pos_emb")
    params = kwargs.get("packed_seq_params")
    if table is None or params is None:
        return None
    row = row_view(params)
    if row.positions_T is None:
        return None
    # A table of another length is one that a subclass of GPTModel has made for itself.
    if table.shape[0] != params.max_seqlen_q:
        if row.branches:
            raise ScheduleError(
                f"{type(block).__name__} got a rotary table of {table.shape[0]} lines for samples "
                f"of at most {params.max_seqlen_q} tokens that share prefixes or are in pieces; "
                "set plan.share_prefixes=off and plan.split_samples=off"
            )
        return None
    if row.images is not None:
        row_table_Td = row.images.mrope.lines(table.flatten(1), row.images.rotary_T3)
    else:
        row_table_Td = table.flatten(1).index_select(0, row.positions_T)
    if tables is not None:
        row_table_Td = tables.for_samples(row_table_Td, row)
    return args, {**kwargs, "rotary_pos_emb": row_table_Td}


def _enter_one_sequence(
    tables: RotaryTables | None, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    table = kwargs.get("rotary_pos_emb")
    # Two dimensions mark the table of a row; unlike an attribute they survive recomputation.
    if table is None or table.dim() != 2:
        return None
    if tables is not None:
        table = tables.for_layer(table, attention.layer_number - 1)
    as_one = seen_as_one(PackedSeqParams(qkv_format="sbhd"), kwargs["packed_seq_params"])
    return args, {**kwargs, "rotary_pos_emb": table[:, None, None], "packed_seq_params": as_one}


def _enter_packed(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    whole = whole_row(kwargs.get("packed_seq_params"))
    if whole is None:
        return None
    query, key, value, *others = args
    packed = (query.squeeze(1), key.squeeze(1), value.squeeze(1), *others)
    return packed, {**kwargs, "packed_seq_params": whole}


def _leave_packed(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
    """[T, heads * d] -> [T, 1, heads * d], which self attention returns in both cases."""
    params = kwargs.get("packed_seq_params")
    is_packed = params is not None and params.qkv_format == "thd"
    return out.flatten(1).unsqueeze(1) if is_packed else out
