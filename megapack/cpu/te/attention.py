"""Fused attention (cuDNN's), sample by sample.

Rows come as [t, h, d] with `cu_seqlens` (THD), or as [s, b, h, d] (SBHD). The forward
keeps the log of each query's sum of exponents; the backward computes with what it is given, so that
a context-parallel ring can give it those over all keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te import enums
from megapack.cpu.te.calls import kernel, refuse, require, version
from megapack.cpu.te.precision import wide

Window = tuple[int, int] | None


# ------------------------------------------------------------------------- which kernel would run


@kernel
def get_fused_attn_backend(*args: Any) -> Any:
    """The kernel of `fused_attn.cpp` for these sizes on Hopper with cuDNN 9.13.

    It also takes fp32 and fp64, so that errors can be compared with 1e-6 and not with bf16's.
    """
    if version() >= (2, 20):
        (asked,) = args
        names = {name: getattr(asked, name, None) for name in _ASKED.split()}
        found = _backend(**{**names, "q_dtype": asked.qkv_dtype, "kv_dtype": asked.qkv_dtype})
        return found, "" if found.value >= 0 else "not rehearsed on the CPU"
    return _backend(**dict(zip(_ASKED.split(), args, strict=False)))


_ASKED = (
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type dropout "
    "num_attn_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v"
)


def _backend(
    *,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: Any,
    bias_type: Any,
    softmax_type: Any,
    num_attn_heads: int,
    num_gqa_groups: int,
    head_dim_qk: int,
    head_dim_v: int,
    **_: Any,
) -> Any:
    """F16_arbitrary_seqlen where cuDNN takes the heads; widths are multiples of 8 up to 256.

    fp32 and fp64 are in no kernel of a GPU, and take heads of every width.
    """
    backends = enums.attention_backends(version())
    is_half = enums.torch_dtype(q_dtype) in (torch.float16, torch.bfloat16)
    fits_width = head_dim_qk % 8 == head_dim_v % 8 == 0 and max(head_dim_qk, head_dim_v) <= 256
    taken = (
        q_dtype == kv_dtype
        and num_attn_heads % num_gqa_groups == 0
        and (fits_width or not is_half)
        and _form(qkv_layout) is not None
        and int(bias_type) == enums.NVTE_Bias_Type.NVTE_NO_BIAS
        and int(softmax_type) == enums.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    )
    return backends.NVTE_F16_arbitrary_seqlen if taken else backends.NVTE_No_Backend


# ------------------------------------------------------------------------------------------ kernels


@kernel(
    "max_seqlen_q max_seqlen_kv is_training scale dropout set_zero layout o_format@2.15 "
    "scale_inv_format@2.15 bias_type mask softmax window bottom_right@2.12 cu_seqlens_q "
    "cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k "
    "page_table_v s_quantizer o_quantizer bias softmax_offset rng_gen rng_elts return_max_logit "
    "cuda_graph"
)
def fused_attn_fwd(
    *, o_quantizer: Any = None, return_max_logit: bool = False, **arguments: Any
) -> list[Tensor]:
    """Outputs like q (tokens of no sample: 0), statistics, and the seed of dropout.

    Statistics are [t, h, 1] for packed rows, as from cuDNN 9.6 on, else [b, h, s, 1].
    """
    refuse(o_quantizer is not None, "fused attention in FP8")
    refuse(return_max_logit, "fused attention with return_max_logit (qk-clip)")
    call = _Call.of(arguments)
    q, v = call.q, call.v
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    statistics = call.empty_statistics()
    seed = torch.randint(1 << 62, (1,)) if call.dropout else torch.zeros(1, dtype=torch.int64)
    for sample in call.samples():
        scores = call.scores(sample)
        total = scores.logsumexp(-1, keepdim=True)
        require(
            bool(total.isfinite().all()),
            f"a query without keys: {sample.num_queries} queries, {sample.num_keys} keys, "
            f"{call.mask.name}, window {call.window}",
        )
        weights = (scores - total).exp() * call.kept(scores, int(seed), sample)
        sample.queries(out).copy_((weights @ _heads(sample.keys(v), q)).transpose(0, 1))
        sample.statistics(statistics).copy_(total.transpose(0, 1))
    return [out, statistics, torch.cat([seed, torch.zeros(1, dtype=torch.int64)])]


@kernel(
    "max_seqlen_q max_seqlen_kv scale dropout set_zero layout o_format@2.15 do_format@2.15 "
    "dqkv_layout@2.15 scale_inv_format@2.15 do_scale_inv_format@2.15 bias_type mask softmax window "
    "bottom_right@2.12 deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype "
    "dqkv_dtype@<2.15 aux cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer "
    "dqkv_quantizer cuda_graph"
)
def fused_attn_bwd(
    *, o: Tensor, d_o: Tensor, aux: list[Tensor], **arguments: Any
) -> list[Tensor | None]:
    """Gradients of q, k and v; none of a bias and of a softmax offset."""
    call = _Call.of(arguments)
    q, k, v = call.q, call.k, call.v
    statistics = aux[0]
    require(o.shape == d_o.shape, f"outputs {tuple(o.shape)}, gradients {tuple(d_o.shape)}")
    expected = call.empty_statistics().shape
    require(
        statistics.shape == expected,
        f"softmax statistics {tuple(statistics.shape)} for queries {tuple(q.shape)}, "
        f"not {tuple(expected)}",
    )
    dq, dk, dv = (torch.zeros_like(wide(t)) for t in (q, k, v))
    for sample in call.samples():
        scores = call.scores(sample)
        weights = (scores - sample.statistics(statistics).transpose(0, 1)).exp()
        kept = call.kept(scores, int(aux[-1][0]), sample)
        grad, outputs = (wide(sample.queries(t)).transpose(0, 1) for t in (d_o, o))
        d_weights = (grad @ _heads(sample.keys(v), q).transpose(1, 2)) * kept
        d_scores = weights * (d_weights - (grad * outputs).sum(-1, keepdim=True)) * call.scale
        sample.queries(dq).copy_((d_scores @ _heads(sample.keys(k), q)).transpose(0, 1))
        heads = _heads(sample.queries(q), q)
        sample.keys(dk).add_(_groups(d_scores.transpose(1, 2) @ heads, k))
        sample.keys(dv).add_(_groups((weights * kept).transpose(1, 2) @ grad, v))
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None]


def _form(layout: Any) -> str | None:
    """The form of queries, keys and values: "THD" or "SBHD"; None: it has no stand-in.

    Of a layout such as NVTE_SBHD_SB2HD; digits say which tensors share memory.
    """
    _, *forms = re.sub(r"\d", "", enums.NVTE_QKV_Layout(int(layout)).name).split("_")
    return forms[0] if {*forms} in ({"THD"}, {"SBHD"}) else None


@dataclass(frozen=True)
class _Sample:
    """Where the queries and keys of a sample are."""

    is_packed: bool
    number: int
    first_query: int
    num_queries: int
    first_key: int
    num_keys: int

    def queries(self, tensor: Tensor) -> Tensor:
        """[queries, heads, width], a view."""
        return self._view(tensor, self.first_query, self.num_queries)

    def keys(self, tensor: Tensor) -> Tensor:
        """[keys, groups, width], a view."""
        return self._view(tensor, self.first_key, self.num_keys)

    def statistics(self, tensor: Tensor) -> Tensor:
        """[queries, heads, 1], a view of what `_Call.empty_statistics` made."""
        if self.is_packed:
            return self.queries(tensor)
        return tensor[self.number].transpose(0, 1)

    def _view(self, tensor: Tensor, first: int, length: int) -> Tensor:
        return tensor[first : first + length] if self.is_packed else tensor[:, self.number]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments that forward and backward share."""

    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float
    dropout: float
    layout: Any
    mask: Any
    window: Window
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    bottom_right: bool | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Call:
        """Those of a kernel's arguments; others only choose among kernels."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    @property
    def is_packed(self) -> bool:
        """Whether rows are packed."""
        return _form(self.layout) == "THD"

    def empty_statistics(self) -> Tensor:
        """Statistics of no query yet; those of tokens of no sample stay NaN."""
        first, second, *others = self.q.shape[:-1]
        shape = (first, second) if self.is_packed else (second, *others, first)
        return wide(self.q).new_full((*shape, 1), float("nan"))

    def samples(self) -> Iterator[_Sample]:
        """The samples with queries.

        Raises:
            KernelFault: tables that the kernels would read wrongly.
        """
        cu_seqlens = self.cu_seqlens_q, self.cu_seqlens_kv
        padded = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        _check(self.q, self.k, self.v, cu_seqlens, padded, self.is_packed)
        if not self.is_packed:
            refuse("PADDING" in self.mask.name, "fused attention of padded samples")
            for number in range(self.q.shape[1]):
                yield _Sample(False, number, 0, len(self.q), 0, len(self.k))
            return
        most = self.max_seqlen_q, self.max_seqlen_kv
        sides = zip((self.q, self.k), cu_seqlens, padded, most, strict=True)
        spans = zip(*(_spans(*side) for side in sides), strict=True)
        for number, ((first_query, queries), (first_key, keys)) in enumerate(spans):
            if queries:
                require(keys > 0, f"sample {number} has {queries} queries and no keys")
                yield _Sample(True, number, first_query, queries, first_key, keys)

    def scores(self, sample: _Sample) -> Tensor:
        """[heads, queries, keys], with -inf where a query must not look."""
        queries, keys = (_heads(t, self.q) for t in (sample.queries(self.q), sample.keys(self.k)))
        scores = queries @ keys.transpose(1, 2) * self.scale
        left, right = self.window or (-1, -1)
        if "CAUSAL" in self.mask.name:
            right = 0
        is_bottom = self.bottom_right
        if is_bottom is None:
            is_bottom = "BOTTOM_RIGHT" in self.mask.name
        shift = sample.num_keys - sample.num_queries if is_bottom else 0
        distance = torch.arange(sample.num_keys) - torch.arange(sample.num_queries)[:, None] - shift
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden |= distance > right
        if left >= 0:
            hidden |= distance < -left
        return scores.masked_fill(hidden, float("-inf"))

    def kept(self, scores: Tensor, seed: int, sample: _Sample) -> Tensor:
        """1 / (1 - dropout) where a weight is kept, else 0; equal for equal seeds and samples."""
        if not self.dropout:
            return scores.new_ones(())
        generator = torch.Generator().manual_seed((seed + sample.number) % (1 << 63))
        drawn = torch.rand(scores.shape, generator=generator)
        return (drawn >= self.dropout).to(scores.dtype) / (1 - self.dropout)


def _spans(
    tensor: Tensor, cu_seqlens: Tensor, padded: Tensor | None, max_seqlen: int
) -> list[tuple[int, int]]:
    """First token and length of each packed sample."""
    ends = cu_seqlens.tolist()
    starts = ends if padded is None else padded.tolist()
    lengths = [end - begin for begin, end in pairwise(ends)]
    longest = max(lengths, default=0)
    require(longest <= max_seqlen, f"max_seqlen={max_seqlen}, but a sample of {longest} tokens")
    require(
        starts[-1] <= len(tensor),
        f"cu_seqlens end at {starts[-1]}, the row has {len(tensor)} tokens",
    )
    return list(zip(starts, lengths, strict=False))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    padded: tuple[Tensor | None, Tensor | None],
    is_packed: bool,
) -> None:
    tables = [table for table in (*cu_seqlens, *padded) if table is not None]
    for table in tables:
        require(table.dtype == torch.int32, f"cu_seqlens of {table.dtype}; kernels read int32")
        require(table.is_contiguous(), f"cu_seqlens with strides {table.stride()}")
        require(
            table.shape == cu_seqlens[0].shape,
            f"cu_seqlens of {len(table)} and of {len(cu_seqlens[0])} entries",
        )
        falls = bool((table.diff() < 0).any()) or int(table[0]) != 0
        require(not falls, f"cu_seqlens do not rise from 0: {table.tolist()}")
    require(q.dtype == k.dtype == v.dtype, f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}")
    require(k.shape[:-1] == v.shape[:-1], f"keys {tuple(k.shape)}, values {tuple(v.shape)}")
    for tensor in (q, k, v):
        require(tensor.stride(-1) == 1, f"heads with strides {tensor.stride()}")
        require(
            not is_packed or tensor.dim() == 3,
            f"packed rows are [tokens, heads, width], this is {tuple(tensor.shape)}",
        )


def _heads(tensor: Tensor, q: Tensor) -> Tensor:
    """[n, groups, d] -> [heads, n, d], each group for the heads that share it."""
    values = wide(tensor)
    return values.repeat_interleave(q.shape[-2] // values.shape[1], 1).transpose(0, 1)


def _groups(tensor: Tensor, like: Tensor) -> Tensor:
    """[heads, n, d] -> [n, groups, d], summed over the heads of a group."""
    groups = like.shape[-2]
    return tensor.view(groups, -1, *tensor.shape[1:]).sum(1).transpose(0, 1)
