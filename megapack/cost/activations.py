"""Bytes that autograd keeps from a forward for its backward: a table of tensors per kind of layer.

What a layer keeps was counted with `torch.autograd.graph.saved_tensors_hooks` over Megatron-Core's
layers (0.16.1 and 0.19.2), and read in Transformer Engine 2.11 for its kernels. Layers G and M are
read, in fla 0.6 and mamba_ssm 2.3, and not counted. FP8 is counted as bf16: Transformer Engine
keeps some inputs in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megapack.base.choices import Kernel, RecomputeModule
from megapack.cost.layers import DELTA_CHUNK, LayerKind
from megapack.cost.sizes import FLASH_WIDTH
from megapack.layout import Layout

# A statistic per normalised vector, or per query and head of attention.
_FP32_BYTES = 4
# Token ids, indices of experts.
_INT64_BYTES = 8

Table = Mapping[str, float]
"""Name of a tensor -> its channels per token."""


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """What autograd keeps per row token of one GPU (after CP), in bytes.

    Tensor parallelism splits heads and MLP widths. It does not split the inputs of norms, attention
    and MLP; sequence parallelism does.
    """

    kind: LayerKind
    layout: Layout
    attention: Kernel
    fused_swiglu: bool
    composite_norms: bool
    recomputes: bool = True
    """Whether `recompute_modules` of the model are recomputed, as before the layer's backward."""

    @property
    def layer(self) -> float:
        """One layer, without recomputation of the whole layer."""
        tables = {
            "*": self._latent_attention if self.kind.model.uses_mla else self._attention,
            "-": self._mlp,
            "E": self._experts,
            "G": self._recurrent,
            "M": self._recurrent,
        }
        norms = 2 if self.kind.model.norm_placement == "sandwich" else 1
        # The outputs of norms are the inputs of the matrices after them.
        outputs = 0.0 if self._recomputes("layernorm") else self.layer_input
        each = norms * self._norm + outputs
        return sum(each + tables[letter]() for letter in self.kind.parts)

    def _attention(self) -> float:
        """Rotated queries and keys, values, the output and the softmax statistic."""
        model, head = self.kind.model, self.kind.head_width
        queries, keys, runs = self._heads * head, self._groups * head, self._runs_attention
        rows = self._gathered_rows
        channels = {
            "rotated queries, output": 2 * queries,
            "rotated keys, values": rows * 2 * keys,
            "output of linear_qkv": self._whole_qkv(queries, keys),
            # `packed_causal_attention` joins the outputs of its runs of samples: a copy.
            "joined outputs": runs * (self.attention == "sdpa" or self._is_wide) * queries,
            # Keys and values of each query head, instead of those of each group.
            "repeated keys, values": runs * self._is_wide * rows * 2 * (queries - keys),
            "cosines, sines": (self.attention != "te") * 4 * head,
            "gate, sigmoid, output before it": model.attention_output_gate * 3 * queries,
        }
        fp32 = {
            "softmax": runs * self._heads,
            "norms of values": model.value_layernorm * (self._groups + self._is_upcast * keys),
        }
        if model.qk_layernorm:
            # Their inputs are views of linear_qkv's output, unless several groups of several
            # queries are reshaped to one dimension of heads. Transformer Engine's norm copies its
            # input (`input_.contiguous()` in ops/basic/rmsnorm.py), and so does the change of a
            # bf16 input to fp32.
            copied = queries if 1 < self._groups < self._heads else 0.0
            if self.attention == "te" or self._is_upcast:
                copied = queries + keys
            (fp32 if self.composite_norms else channels)["inputs of norms"] = copied
            fp32["normalised"] = self.composite_norms * (queries + keys)
            fp32["norms"] = self._heads + self._groups
        return self._bytes(channels, fp32)

    def _whole_qkv(self, queries: float, keys: float) -> float:
        """Channels of linear_qkv's output that are kept because something is a view into it.

        `Attention.get_query_key_value_tensors` splits that output into views, and values are one.
        Transformer Engine's attention copies the values, because their strides differ from those of
        the rotated keys (`get_qkv_layout` in dot_product_attention/utils.py). With core attention
        recomputed, the checkpoint keeps its inputs, and these are the views.
        """
        model = self.kind.model
        if self._gathers:
            return queries + 2 * keys if model.qk_layernorm else 0.0
        if model.value_layernorm:
            # The norm's input is such a view, and its output is kept too.
            return 0.0 if self._is_upcast else queries + 2 * keys
        return 0.0 if self.attention == "te" and self._runs_attention else queries + keys

    def _latent_attention(self) -> float:
        """The same of multi-latent attention, and the latents.

        `MLASelfAttention` joins both parts of queries and of keys, and copies values: all three are
        kept as they enter core attention, and what the up projections made of them is not. The
        latent of keys and values is a view into the output of a down projection, which also has the
        keys to be rotated.
        """
        kind, model = self.kind, self.kind.model
        queries, values = self._heads * kind.head_width, self._heads * kind.value_width
        index_key, index_queries = kind.indexer_widths
        latents = self._scatter * ((model.q_lora_rank or 0) + (model.kv_lora_rank or 0))
        runs, has_norms = self._runs_attention, model.qk_layernorm
        channels = {
            "queries, output": queries + values,
            "keys, values": self._gathered_rows * (queries + values + index_key),
            # And their gradients, which the forward finds.
            "queries of the indexer": 2 * index_queries,
            "joined outputs": runs * (self.attention == "sdpa") * values,
            "cosines, sines": (self.attention != "te") * 4 * kind.rotary_width,
            "latents": latents * (1 + (has_norms and not self.composite_norms)),
            "keys to be rotated": (not self._is_upcast) * self._scatter * kind.rotary_width,
        }
        fp32 = {
            "softmax": runs * self._heads,
            "normalised latents": has_norms * self.composite_norms * 2 * latents,
            "norms": has_norms * self._scatter * (1 if model.q_lora_rank is None else 2),
        }
        return self._bytes(channels, fp32)

    def _recurrent(self) -> float:
        """The output of the first projection, and what a scan keeps; in fp32 two numbers per head.

        Of a gated delta net the convolution and the gated norm keep views of that output; queries
        and keys are kept before and after their norm, repeated to the heads of values. Of Mamba it
        is the output of the convolution, and that of the scan before and after the norm.
        """
        part = self.kind.recurrent()
        channels = {"output of in_proj": part.inner}
        if "G" in self.kind.parts:
            channels["queries, keys"] = 2 * part.keys
            repeated = part.heads * (self.kind.model.linear_key_head_dim or 0)
            channels["repeated queries, keys"] = 2 * repeated
            channels["values, output around its norm"] = 3 * part.outputs
            channels["inverse of a chunk, a row"] = DELTA_CHUNK * part.heads
        else:
            channels["output of the convolution"] = part.convolved
            channels["output around its norm"] = 2 * part.outputs
        return self._bytes(channels, {"steps, decays": 2 * part.heads}) / self.layout.tp

    def _mlp(self) -> float:
        if self._recomputes("mlp"):
            return 0.0
        return self._width * self._mlp_channels * self.kind.width / self.layout.tp

    def _experts(self) -> float:
        """The router, the permuted tokens and the experts, with even routing.

        A token is routed on one TP rank. Each chosen expert keeps the token as fc1's input. It
        scales the activation by the router's probability: unfused, the product before scaling is
        kept too.
        """
        model, kind = self.kind.model, self.kind
        around = self._inner_norms if model.moe_inner_norms else 0.0
        if self._recomputes("moe"):
            return around
        has_gate = model.gated_linear_unit
        channels = self._mlp_channels + (0 if has_gate and self.fused_swiglu else 1)
        if self._recomputes("moe_act"):
            # fc1's output stays, for the activation.
            channels = 2 if has_gate else 1
        # Chosen experts as int64, and their fp32 scores. The permutation as int64 and in fp32 with
        # a mask over all experts, or in Transformer Engine's kernel a map of two int32 per expert
        # (`make_row_id_map` in triton/permutation.py).
        router = (_INT64_BYTES + _FP32_BYTES) * model.moe_top_k
        if self.attention == "te":
            router += 8 * kind.num_experts + 4
        else:
            router += 5 * kind.num_experts + _INT64_BYTES * model.moe_top_k
        routed = {"inputs": model.routed_width, "inside": channels * kind.width / self.layout.etp}
        shared = {
            "inside": self._mlp_channels * kind.shared_width / self.layout.tp,
            # It multiplies the shared expert's output.
            "gate": model.moe_shared_gate * (self._hidden + self._scatter),
            "experts' sum before its projection": self._scatter * (model.moe_latent_size or 0),
        }
        expert = self._bytes(routed, {"score": 1})
        return self._scatter * router + self._routes * expert + self._bytes(shared) + around

    @property
    def _inner_norms(self) -> float:
        """Norms around the shared expert and the experts, and what is before and after a router.

        There are three more than other layers have. The norm before the experts, and the one in the
        router, have the layer's own norm's input. The router keeps its input before and after it is
        multiplied, and its scores.
        """
        again = _FP32_BYTES if self._is_upcast else -self._width
        scores = _FP32_BYTES * self._scatter * (1 + self.kind.num_experts)
        return 3 * self._norm + (2 * self._width + again) * self._hidden + scores

    @property
    def layer_input(self) -> float:
        """A layer's input, which is all that full recomputation keeps of it."""
        return self._width * self._hidden

    @property
    def held(self) -> float:
        """What a layer keeps from its forward to its backward."""
        return self.layer_input if self._is_full else self.layer

    @property
    def recomputed_layer(self) -> float:
        """What a layer keeps in addition while its backward recomputes it, or parts of it."""
        whole = replace(self, recomputes=False).layer
        if self._is_full:
            return whole - (0.0 if self._is_upcast else self.layer_input)
        # Recomputed attention alone may keep more than it frees.
        return max(0.0, whole - self.layer)

    @property
    def final_norm_and_head(self) -> float:
        """On the last stage: the final norm, and the head as if all tokens had a log-prob.

        The head keeps the hidden states of the whole row, also under sequence parallelism, and per
        position the label, its place in the row, log Z and the entropy.
        """
        positions = 2 * _INT64_BYTES + 2 * _FP32_BYTES
        return self._norm + self._width * self.kind.model.hidden_size + positions

    @property
    def rotary_table(self) -> float:
        """The row's rotary table in fp32, once per chunk, where autograd or a checkpoint keeps it.

        Without Transformer Engine's kernel a layer keeps its own cosines and sines instead. Layers
        with MLA have tables of their own, which no checkpoint keeps.
        """
        model = self.kind.model
        if model.uses_mla or not (self.attention == "te" or self._is_full):
            return 0.0
        return _FP32_BYTES * (model.head_width + (model.global_kv_channels or 0))

    @property
    def embedding(self) -> float:
        """On the first stage: the ids, for the gradient of the embedding."""
        return _INT64_BYTES

    @property
    def gathered_token(self) -> float:
        """Keys and values that a layer keeps of a token of another context-parallel rank.

        Transformer Engine's ring keeps none, and attention that is recomputed gathers again.
        """
        if (self.attention == "te" and not self._is_wide) or not self._runs_attention:
            return 0.0
        return self.carried_token

    @property
    def carried_token(self) -> float:
        """Keys and values of a token in a layer, which later pieces of its sample read."""
        kind = self.kind
        if "*" not in kind.parts:
            return 0.0
        if kind.model.uses_mla:
            heads = self._heads * (kind.head_width + kind.value_width)
            return self._width * (heads + kind.indexer_widths[0])
        return self._width * 2 * self._groups * kind.head_width

    @property
    def carried_state(self) -> float:
        """What a layer G or M hands from a piece to the next one: the state in fp32, and the last
        inputs of the convolution."""
        if not set(self.kind.parts) & set("GM"):
            return 0.0
        part = self.kind.recurrent()
        tail = {"inputs of the convolution": (part.conv_tokens - 1) * part.convolved}
        return self._bytes(tail, {"state": part.state}) / self.layout.tp

    def _bytes(self, channels: Table, fp32: Table | None = None) -> float:
        """Bytes of a table, and of one of fp32 numbers."""
        return self._width * sum(channels.values()) + _FP32_BYTES * sum((fp32 or {}).values())

    def _recomputes(self, module: RecomputeModule) -> bool:
        model = self.kind.model
        is_selective = self.recomputes and model.recompute == "selective"
        return is_selective and module in model.recompute_modules

    @property
    def _is_full(self) -> bool:
        return self.kind.model.recompute == "full"

    @property
    def _runs_attention(self) -> bool:
        """Whether the backward does not run core attention again."""
        return not self._recomputes("core_attn")

    @property
    def _width(self) -> int:
        return 2 if self.kind.model.dtype == "bf16" else 4

    @property
    def _scatter(self) -> float:
        """The share of a row's tokens that a TP rank has outside of attention and MLP."""
        return 1 / self.layout.tp if self.layout.sequence_parallel else 1.0

    @property
    def _hidden(self) -> float:
        """Channels of the residual stream times the share of tokens on one TP rank."""
        return self.kind.model.hidden_size * self._scatter

    @property
    def _heads(self) -> float:
        return self.kind.model.num_attention_heads / self.layout.tp

    @property
    def _groups(self) -> float:
        return self.kind.groups / self.layout.tp

    @property
    def _routes(self) -> float:
        """Chosen experts of a token, per TP rank."""
        return self.kind.model.moe_top_k * self.layout.etp / self.layout.tp

    @property
    def _is_wide(self) -> bool:
        """Whether core attention is torch's whatever the kernel of the other layers."""
        return not self.kind.model.uses_mla and self.kind.head_width > FLASH_WIDTH

    @property
    def _gathers(self) -> bool:
        """Whether attention keeps the keys and values of the whole row."""
        return self.layout.cp > 1 and self.gathered_token > 0

    @property
    def _gathered_rows(self) -> float:
        """Keys that attention keeps over the tokens of this rank; 1 without context parallelism.

        A rank's two parts of a sample attend to (r + 1) / (2 cp) and (2 cp - r) / (2 cp) of it,
        which is 1 + 1 / (2 cp) in all.
        """
        return self.layout.cp + 0.5 if self._gathers else 1.0

    @property
    def _norm(self) -> float:
        """The input and the statistic of a norm of the residual stream.

        torch computes RMSNorm on a CPU with separate operations in fp32. They keep the input and
        the normalised input in fp32, whatever the dtype.
        """
        width = 2 * _FP32_BYTES if self.composite_norms else self._width
        return width * self._hidden + _FP32_BYTES * self._scatter

    @property
    def _is_upcast(self) -> bool:
        """Whether norms make an fp32 copy of their input."""
        return self.composite_norms and self.kind.model.dtype == "bf16"

    @property
    def _mlp_channels(self) -> int:
        """Tensors of the MLP's width: outputs of fc1, inside the activation, inputs of fc2.

        SwiGLU's fc1 is twice as wide. Fused, it keeps fc1's output and fc2's input: 3. Unfused
        (`glu` in transformer/mlp.py), it also keeps silu(gate) and the copy that `x_linear +
        glu_linear_offset` makes: 5.
        """
        if not self.kind.model.gated_linear_unit:
            return 2
        return 3 if self.fused_swiglu else 5
