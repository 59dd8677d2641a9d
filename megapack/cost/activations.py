"""Bytes that autograd keeps from a forward for its backward, tensor by tensor.

What a layer keeps was counted with `torch.autograd.graph.saved_tensors_hooks` over Megatron-Core's
layers (0.16.1 and 0.19.2), and read in Transformer Engine 2.11 for its kernels. Layers G and M are
read, in fla 0.6 and mamba_ssm 2.3, and not counted. FP8 is counted as bf16: Transformer Engine
keeps some inputs in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapack.base.choices import Dtype, Kernel, Recompute, RecomputeModule
from megapack.cost.sizes import DELTA_CHUNK, FLASH_WIDTH, ModelSizes
from megapack.cost.weights import MAMBA_CONV_TOKENS
from megapack.layout import Layout

# A statistic per normalised vector, or per query and head of attention.
_FP32_BYTES = 4
# Token ids, indices of experts.
_INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """What autograd keeps per row token of one GPU (after CP), in bytes.

    Tensor parallelism splits heads and MLP widths. It does not split the inputs of norms, attention
    and MLP; sequence parallelism does.
    """

    sizes: ModelSizes
    layout: Layout
    dtype: Dtype = "bf16"
    attention: Kernel = "te"
    recompute: Recompute = "none"
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    fused_swiglu: bool = True
    composite_norms: bool = False

    @property
    def layer(self) -> float:
        """One layer, without recomputation of the whole layer."""
        parts = self.sizes.sublayers
        # The outputs of norms are the inputs of the matrices after them.
        outputs = 0.0 if self._recomputes("layernorm") else len(parts) * self._width * self._hidden
        kept = len(parts) * self.sizes.norms_per_part * self._norm + outputs
        for letter in parts:
            kept += self._part(letter)
        if self.sizes.expert_inner_norms:
            kept += self._inner_norms
        return kept

    @property
    def _inner_norms(self) -> float:
        """Norms around the shared expert and the experts, and what is before and after a router.

        There are three more than other layers have. The norm before the experts, and the one in the
        router, have the layer's own norm's input. The router keeps its input before and after it is
        multiplied, and its scores.
        """
        again = _FP32_BYTES if self._is_upcast else -self._width
        scores = _FP32_BYTES * self._scatter * (1 + (self.sizes.num_experts or 0))
        return 3 * self._norm + (2 * self._width + again) * self._hidden + scores

    def _part(self, letter: str) -> float:
        """One part of a layer, without the norm before it."""
        if letter == "*":
            return self._attention
        if letter == "-":
            return self._dense_mlp
        if letter == "E":
            return self._experts
        return self._delta_net if letter == "G" else self._mamba

    def _recomputes(self, module: RecomputeModule) -> bool:
        return self.recompute == "selective" and module in self.recompute_modules

    @property
    def layer_input(self) -> float:
        """A layer's input, which is all that full recomputation keeps of it."""
        return self._width * self._hidden

    @property
    def held(self) -> float:
        """What a layer keeps from its forward to its backward."""
        return self.layer_input if self.recompute == "full" else self.layer

    @property
    def recomputed_layer(self) -> float:
        """What a layer keeps in addition while its backward recomputes it, or parts of it."""
        whole = replace(self, recompute="none").layer
        if self.recompute == "full":
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
        return self._norm + self._width * self.sizes.hidden_size + positions

    @property
    def rotary_table(self) -> float:
        """The row's rotary table in fp32, once per chunk, where autograd or a checkpoint keeps it.

        Without Transformer Engine's kernel a layer keeps its own cosines and sines instead. Layers
        with MLA have tables of their own, which no checkpoint keeps.
        """
        keeps = self.attention == "te" or self.recompute == "full"
        keeps = keeps and not self.sizes.uses_mla
        width = self.sizes.rotary_width + (self.sizes.global_kv_channels or 0)
        return _FP32_BYTES * width if keeps else 0.0

    @property
    def embedding(self) -> float:
        """On the first stage: the ids, for the gradient of the embedding."""
        return _INT64_BYTES

    @property
    def _width(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def _hidden(self) -> float:
        """Channels of the residual stream times the share of tokens on one TP rank."""
        return self.sizes.hidden_size * self._scatter

    @property
    def _scatter(self) -> float:
        return 1 / self.layout.tp if self.layout.sequence_parallel else 1.0

    @property
    def _is_wide(self) -> bool:
        """Whether core attention is torch's whatever the kernel of the other layers."""
        return not self.sizes.uses_mla and self.sizes.head_width > FLASH_WIDTH

    @property
    def _heads(self) -> float:
        return self.sizes.num_attention_heads / self.layout.tp

    @property
    def _groups(self) -> float:
        return (self.sizes.num_query_groups or self.sizes.num_attention_heads) / self.layout.tp

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
        return self.composite_norms and self.dtype == "bf16"

    @property
    def _delta_net(self) -> float:
        """The output of the first projection, of which the convolution and the gated norm keep
        views; queries and keys before and after their norm, repeated to the heads of values;
        values; the output before and after the gated norm. In fp32 beta and the decay per head; and
        of each head a row of its chunk's inverse."""
        keys, values = self.sizes.delta_widths
        heads = self.sizes.linear_num_value_heads or 0
        repeated = heads * (self.sizes.linear_key_head_dim or 0)
        kept = 2 * keys + 2 * values + 2 * heads + 2 * keys + 2 * repeated + 3 * values
        kept += DELTA_CHUNK * heads
        return (self._width * kept + 2 * _FP32_BYTES * heads) / self.layout.tp

    @property
    def _mamba(self) -> float:
        """The output of the first projection, that of the convolution, and that of the scan before
        and after the norm; in fp32 the steps and their sums per head."""
        inner, states = self.sizes.mamba_widths
        heads = self.sizes.mamba_num_heads or 0
        kept = 2 * inner + 2 * states + heads + inner + 2 * states + 2 * inner
        return (self._width * kept + 2 * _FP32_BYTES * heads) / self.layout.tp

    @property
    def _attention(self) -> float:
        """Rotated queries and keys, values, the output and the softmax statistic."""
        if self.sizes.uses_mla:
            return self._latent_attention
        head = self.sizes.head_width
        queries = self._heads * head
        keys = self._groups * head
        if self._gathers:
            kept = 2 * queries + self._gathered_rows * 2 * keys
            kept += queries + 2 * keys if self.sizes.qk_layernorm else 0.0
        elif self.sizes.value_layernorm and not self._is_upcast:
            # The norm's input is a view into the output of linear_qkv, and its output is kept too.
            kept = 3 * queries + 4 * keys
        elif self._keeps_qkv and not self.sizes.value_layernorm:
            kept = 3 * queries + 3 * keys
        else:
            kept = 2 * queries + 2 * keys
        scalars = 0.0
        if not self._recomputes("core_attn"):
            scalars = _FP32_BYTES * self._heads
            if self.attention == "sdpa" or self._is_wide:
                # `path_causal_attention` joins the outputs of its runs of samples: a copy.
                kept += queries
            if self._is_wide:
                # Keys and values of each query head, instead of those of each group.
                kept += self._gathered_rows * 2 * (queries - keys)
        rotary = 0.0 if self.attention == "te" else 4 * self._width * head
        if self.sizes.value_layernorm:
            scalars += _FP32_BYTES * (self._groups + (keys if self._is_upcast else 0.0))
        if self.sizes.attention_output_gate:
            # The gate, its sigmoid, and the output before the product.
            kept += 3 * queries
        return self._width * kept + scalars + rotary + self._qk_norms(queries, keys)

    @property
    def _latent_attention(self) -> float:
        """The same of multi-latent attention, and the latents.

        `MLASelfAttention` joins both parts of queries and of keys, and copies values: all three are
        kept as they enter core attention, and what the up projections made of them is not.
        """
        queries = self._heads * self.sizes.head_width
        values = self._heads * self.sizes.value_width
        kept = queries + values + self._gathered_rows * (queries + values + self._index_keys)
        if self._index_keys:
            # The indexer's queries and weights; and their gradients, which the forward finds.
            kept += 2 * (self.sizes.index_width - self._index_keys)
        scalars = 0.0
        if not self._recomputes("core_attn"):
            scalars = _FP32_BYTES * self._heads
            kept += values if self.attention == "sdpa" else 0.0
        rotary = 0.0 if self.attention == "te" else 4 * self._width * self.sizes.rotary_width
        return self._width * kept + scalars + rotary + self._scatter * self._latents

    @property
    def _index_keys(self) -> int:
        """Channels of an indexer's key, which all tensor-parallel ranks have."""
        return self.sizes.indexer_head_dim or 0

    @property
    def _latents(self) -> float:
        """Inputs of the up projections, and what the norms before them keep.

        The latent of keys and values is a view into the output of a down projection, which also has
        the keys to be rotated.
        """
        sizes = self.sizes
        latents = (sizes.q_lora_rank or 0) + (sizes.kv_lora_rank or 0)
        outputs = self._width * latents
        beside = 0.0 if self._is_upcast else self._width * sizes.rotary_width
        if not sizes.qk_layernorm:
            return outputs + beside
        norms = 1 if sizes.q_lora_rank is None else 2
        width = 2 * _FP32_BYTES if self.composite_norms else self._width
        return outputs + beside + width * latents + _FP32_BYTES * norms

    @property
    def gathered_token(self) -> float:
        """Keys and values that a layer keeps of a token of another context-parallel rank.

        Transformer Engine's ring keeps none, and attention that is recomputed gathers again.
        """
        if (self.attention == "te" and not self._is_wide) or self._recomputes("core_attn"):
            return 0.0
        return self.carried_token

    @property
    def carried_token(self) -> float:
        """Keys and values of a token in a layer, which later pieces of its sample read."""
        sizes = self.sizes
        if "*" not in sizes.sublayers:
            return 0.0
        if sizes.uses_mla:
            heads = self._heads * (sizes.head_width + sizes.value_width)
            return self._width * (heads + self._index_keys)
        return self._width * 2 * self._groups * sizes.head_width

    @property
    def carried_state(self) -> float:
        """What a layer G or M hands from a piece to the next one: the state in fp32, and the last
        inputs of the convolution."""
        sizes = self.sizes
        state = tail = 0
        if "G" in sizes.sublayers:
            keys, values = sizes.delta_widths
            state = values * (sizes.linear_key_head_dim or 0)
            tail = (sizes.linear_conv_kernel_dim - 1) * (2 * keys + values)
        elif "M" in sizes.sublayers:
            inner, states = sizes.mamba_widths
            state = inner * sizes.mamba_state_dim
            tail = (MAMBA_CONV_TOKENS - 1) * (inner + 2 * states)
        return (_FP32_BYTES * state + self._width * tail) / self.layout.tp

    @property
    def put_off_token(self) -> float:
        """What a layer keeps of a token from its backward to its weight gradients: the inputs of
        its matrices, and the gradients of their outputs.

        Experts have those of each chosen one. Multi-latent attention is counted as attention whose
        matrices make queries, keys and values from hidden states.
        """
        sizes = self.sizes
        mixers = sum(self._put_off_mixer(letter) for letter in sizes.sublayers)
        matrices = 2 if sizes.gated else 1
        if not set(sizes.sublayers) & set("-E"):
            mlp = 0.0
        elif sizes.num_experts is None:
            mlp = 2 * self._hidden + (1 + matrices) * sizes.ffn_hidden_size / self.layout.tp
        else:
            routes = sizes.experts_per_token * self.layout.etp / self.layout.tp
            ffn = (1 + matrices) * sizes.ffn_hidden_size / self.layout.etp
            mlp = routes * (2 * sizes.hidden_size + ffn)
            shared = sizes.shared_expert_ffn_hidden_size
            mlp += 2 * self._hidden + (1 + matrices) * shared / self.layout.tp if shared else 0.0
        return self._width * (mixers + mlp)

    def _put_off_mixer(self, letter: str) -> float:
        """Channels of `put_off_token` of a part that mixes tokens."""
        sizes = self.sizes
        if letter == "*":
            heads = self._heads * sizes.head_width
            gates = heads if sizes.attention_output_gate else 0.0
            return 2 * self._hidden + 2 * heads + gates + self.carried_token / self._width
        if letter == "G":
            keys, out = sizes.delta_widths
            inner = 2 * keys + 2 * out + 2 * (sizes.linear_num_value_heads or 0)
        elif letter == "M":
            out, states = sizes.mamba_widths
            inner = 2 * out + 2 * states + (sizes.mamba_num_heads or 0)
        else:
            return 0.0
        return 2 * self._hidden + (inner + out) / self.layout.tp

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
    def _keeps_qkv(self) -> bool:
        """Whether values are a view into the output of linear_qkv, which is then kept as a whole.

        `Attention.get_query_key_value_tensors` splits that output into views. Transformer Engine's
        attention copies the values, because their strides differ from those of the rotated keys
        (`get_qkv_layout` in dot_product_attention/utils.py). With core attention recomputed, the
        checkpoint keeps its inputs, and these are the views.
        """
        return self.attention != "te" or self._recomputes("core_attn")

    def _qk_norms(self, queries: float, keys: float) -> float:
        """What the norms of queries and keys keep in addition to linear_qkv's output.

        Their inputs are views of that output, unless several groups of several queries are reshaped
        to one dimension of heads. Transformer Engine's norm copies its input (`input_.contiguous()`
        in ops/basic/rmsnorm.py), and so does the change of a bf16 input to fp32.
        """
        if not self.sizes.qk_layernorm:
            return 0.0
        copied = queries if 1 < self._groups < self._heads else 0.0
        if self.attention == "te" or self._is_upcast:
            copied = queries + keys
        width = _FP32_BYTES if self.composite_norms else self._width
        normalised = _FP32_BYTES * (queries + keys) if self.composite_norms else 0.0
        return width * copied + normalised + _FP32_BYTES * (self._heads + self._groups)

    @property
    def _dense_mlp(self) -> float:
        if self._recomputes("mlp"):
            return 0.0
        return self._width * self._mlp_channels * self.sizes.ffn_hidden_size / self.layout.tp

    @property
    def _mlp_channels(self) -> int:
        """Tensors of the MLP's width: outputs of fc1, inside the activation, inputs of fc2.

        SwiGLU's fc1 is twice as wide. Fused, it keeps fc1's output and fc2's input: 3. Unfused
        (`glu` in transformer/mlp.py), it also keeps silu(gate) and the copy that `x_linear +
        glu_linear_offset` makes: 5.
        """
        if not self.sizes.gated:
            return 2
        return 3 if self.fused_swiglu else 5

    @property
    def _experts(self) -> float:
        """The router, the permuted tokens and the experts, with even routing.

        A token is routed on one TP rank. Each chosen expert keeps the token as fc1's input. It
        scales the activation by the router's probability: unfused, the product before scaling is
        kept too.
        """
        if self._recomputes("moe"):
            return 0.0
        sizes = self.sizes
        fused = sizes.gated and self.fused_swiglu
        channels = self._mlp_channels + (0 if fused else 1)
        if self._recomputes("moe_act"):
            # fc1's output stays, for the activation.
            channels = 2 if sizes.gated else 1
        ffn = channels * sizes.ffn_hidden_size / self.layout.etp
        expert = self._width * (sizes.hidden_size + ffn)
        routes = sizes.experts_per_token * self.layout.etp / self.layout.tp
        shared = self._mlp_channels * sizes.shared_expert_ffn_hidden_size / self.layout.tp
        # The gate multiplies the shared expert's output.
        shared += self._hidden + self._scatter if sizes.shared_expert_gate else 0.0
        return self._router + routes * (expert + _FP32_BYTES) + self._width * shared

    @property
    def _router(self) -> float:
        """Scores and permutation of a token; its normed hidden states are counted in `layer`.

        Chosen experts as int64, their fp32 scores; the permutation as int64 and in fp32 with a mask
        over all experts, or in Transformer Engine's kernel a map of two int32 per expert
        (`make_row_id_map` in triton/permutation.py).
        """
        sizes = self.sizes
        chosen = (_INT64_BYTES + _FP32_BYTES) * sizes.experts_per_token
        experts = sizes.num_experts or 0
        if self.attention == "te":
            permutation = 8 * experts + 4
        else:
            permutation = 5 * experts + _INT64_BYTES * sizes.experts_per_token
        return self._scatter * (chosen + permutation)
