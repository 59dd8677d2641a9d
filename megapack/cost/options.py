"""What is told of a model: each option once, with its default and its meaning.

    ModelOptions -> ModelSizes (what a model costs) -> ModelConfig (the main job's section `model`)

Checks, the cost and memory models, the builder and the reader of Hugging Face folders read the
options from here. Checked here is what every reader relies on: whole numbers in their ranges, and
that the sizes of each kind of layer are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from megapack.base.choices import Attention, Dtype, Recompute, RecomputeModule
from megapack.cost.rope import RopeScaling
from megapack.errors import ConfigError

BYTE_VOCAB_SIZE = 259
"""Vocabulary of the built-in tokenizer: 256 bytes and three special tokens."""
NEEDED: dict[str, tuple[str, ...]] = {
    "G": (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    ),
    "M": ("mamba_num_heads",),
    "*": (),
    "-": (),
    "E": ("num_experts",),
}
"""Letters of `hybrid_layer_pattern` -> options that such a layer needs: gated delta net, Mamba-2,
attention, MLP, experts."""
NOT_IN_FOLDERS = (
    *("hf_path", "megatron_class", "attention", "dtype", "fp8", "init_std", "freeze"),
    *("bias_activation_fusion", "gradient_accumulation_fusion", "recompute", "recompute_modules"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_balance_loss_coef", "moe_z_loss_coef"),
    *("moe_bias_update_rate", "indexer_loss_coef", "mtp_num_layers", "mtp_loss_coef"),
)
"""Options of how a model is run and trained. All others are its architecture, which the config.json
of a Hugging Face folder gives."""
# Whole numbers that may be 0; all others are at least 1.
_FROM_ZERO = ("moe_first_dense_layers", "mtp_num_layers")
# Numbers above 0; all others but whole ones are at least 0.
_ABOVE_ZERO = (
    *("attention_scale", "attention_score_cap", "logit_cap", "activation_clamp"),
    "moe_route_scale",
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A GPT as Megatron-Core builds it. The defaults are a toy that trains on a laptop."""

    SECTION: ClassVar[str] = ""
    """What stands before an option's name in errors."""

    hf_path: str | None = None
    """A folder of a Hugging Face model. Its config.json gives the keys of the architecture, from
    `num_layers` to `rope_scaling` and those of attention and experts; a key that is also set here
    must be equal. null = the keys here."""
    num_layers: int = 4
    """Transformer layers; a multiple of pp * vpp, or split by keys of `layout`. Each
    letter of a pattern is one."""
    megatron_class: Literal["gpt", "hybrid"] | None = None
    """Megatron's class: gpt (GPTModel) or hybrid (HybridModel, Megatron-Core 0.18 and later), whose
    layers are attention or an MLP alone; null = hybrid if there is a pattern."""
    hybrid_layer_pattern: str | None = None
    """Kinds of the layers of a hybrid model, a letter each: G gated delta net (arXiv 2412.06464), M
    Mamba-2 (arXiv 2405.21060), * attention, - MLP, E experts. A block of Qwen3-Next is two letters,
    `GE` or `*E`. After a `/` come the layers of each depth of multi-token prediction, as in
    `GEGE*E/*E`. null = `*-` or `*E` for each of `num_layers`, if megatron_class is hybrid."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Query heads; a multiple of tp."""
    num_query_groups: int | None = None
    """Key and value heads (grouped queries); null = one per query head."""
    kv_channels: int | None = None
    """Width of a head, even; null = hidden_size / num_attention_heads."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys before the rotary embedding (Qwen3). With multi-latent
    attention: normalise the compressed queries and keys (DeepSeek-V3)."""
    qk_layernorm_over_heads: bool = False
    """With `qk_layernorm`: normalise the queries of all heads together, and so the keys, with a
    weight per channel of each head (OLMo-2)."""
    qk_layernorm_after_rotation: bool = False
    """With `qk_layernorm`: normalise after the rotary embedding (Hunyuan), not before."""
    value_layernorm: bool = False
    """Normalise each head's values, without weights (Gemma 4)."""
    global_kv_channels: int | None = None
    """With `rotary_pattern`: width of a head in global layers, even (Gemma 4: 512); null =
    `kv_channels`."""
    global_query_groups: int | None = None
    """With `rotary_pattern`: key and value heads of global layers; null = `num_query_groups`."""
    global_keys_as_values: bool = False
    """With `rotary_pattern`: global layers have no projection to values, which are the keys before
    their norm and rotation (Gemma 4)."""
    attention_scale: float | None = None
    """Factor of the scores before the softmax; null = 1 / sqrt(width of a head)."""
    attention_score_cap: float | None = None
    """Scores s become cap * tanh(s / cap) before the softmax (Gemma 2: 50). Runs in torch's own
    operations, with attention=sdpa; null = they are not capped."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values (Qwen2)."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP of layers without experts; null = 4 * hidden_size."""
    vocab_size: int | None = None
    """Rows of the embedding before Megatron pads them; null = the tokenizer's."""
    max_position_embeddings: int = 4096
    """Tokens of the longest sample that the model supports."""
    rotary_base: int = 10000
    """Base of the rotary embedding's wavelengths."""
    rotary_percent: float = 1.0
    """Part of a head's channels that is rotated, in (0, 1] (GLM-4.5: 0.5)."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels as pairs (Ernie 4.5), instead of those of both halves."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Longer wavelengths of the rotary embedding; see `RopeScaling`."""
    local_rotary_base: int | None = None
    """Base of the rotary embedding of local layers, which is not stretched (Gemma 3, OLMo-3); null
    = all layers have the same."""
    rotary_pattern: str | None = None
    """With `local_rotary_base`: L for a local layer, G for a global one, repeated over the layers
    (Gemma 3: LLLLLG)."""
    position_embedding_type: Literal["rope", "none"] = "rope"
    """none = attention without positions (Nemotron-H)."""
    attention_window: int | None = None
    """Tokens that a token sees in layers with a sliding window, its own among them (Mistral: 4096);
    null = all before it."""
    attention_window_pattern: str | None = None
    """With `attention_window`: L for a layer with the window, G for one without, repeated over the
    layers (gpt-oss: LG); null = all layers have it."""
    attention_sinks: bool = False
    """A learned logit per head in the softmax of attention, whose value is 0 (gpt-oss)."""
    attention_output_gate: bool = False
    """Multiply what a head's attention gives by a sigmoid gate (Qwen3-Next)."""
    linear_num_key_heads: int | None = None
    """For layers G: heads of queries and keys, a multiple of tp * cp."""
    linear_num_value_heads: int | None = None
    """For layers G: heads of values, a multiple of `linear_num_key_heads`."""
    linear_key_head_dim: int | None = None
    """For layers G: channels of a head's queries and keys."""
    linear_value_head_dim: int | None = None
    """For layers G: channels of a head's values."""
    linear_conv_kernel_dim: int = 4
    """For layers G: tokens that the convolution before the scan sees."""
    mamba_num_heads: int | None = None
    """For layers M: heads, a multiple of tp * cp."""
    mamba_head_dim: int = 64
    """For layers M: channels of a head."""
    mamba_state_dim: int = 128
    """For layers M: channels of the state by which a head's channels are multiplied."""
    mamba_num_groups: int = 8
    """For layers M: groups of heads that share B and C; a multiple of tp."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """The norm of every layer."""
    norm_epsilon: float = 1e-5
    """Added to the mean square under the square root of a norm."""
    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight (Qwen3-Next), except those inside of layers G and M."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Where attention and MLP have their norms: pre = of their inputs, post = of what they add to
    the residual stream (OLMo-2), sandwich = both (Gemma)."""
    gated_linear_unit: bool = True
    """A gate in the MLP: SwiGLU."""
    activation: Literal["silu", "gelu", "gelu_tanh", "squared_relu", "quick_gelu"] | None = None
    """Activation of the MLP; null = silu with a gate, gelu without. gelu_tanh approximates gelu by
    a tanh (Gemma), squared_relu has no gate (Nemotron-H), quick_gelu is x * sigmoid(1.702 x)
    (gpt-oss)."""
    activation_clamp: float | None = None
    """With quick_gelu: limit of the gate from above, and of the part that it multiplies from both
    sides (gpt-oss: 7); null = none."""
    glu_linear_offset: float = 0.0
    """With quick_gelu: added to the part that the gate multiplies (gpt-oss: 1)."""
    layer_scalars: bool = False
    """Multiply what a layer adds up to by a number of its own, which is not trained (Gemma 4)."""
    linear_bias: bool = False
    """Add biases to all linear layers of attention, MLPs and experts, and to routers (gpt-oss)."""
    scale_embeddings: bool = False
    """Multiply the input embeddings by sqrt(hidden_size), rounded to `dtype` (Gemma)."""
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap), before a temperature (Gemma 2: 30); null = they are not
    capped."""
    untie_embeddings: bool = False
    """Use a separate output matrix; false = the input embedding's, on the first and last stage."""
    kv_lora_rank: int | None = None
    """Channels of a token's compressed keys and values in multi-latent attention (MLA, arXiv
    2405.04434); null = grouped queries."""
    q_lora_rank: int | None = None
    """For MLA: channels of a token's compressed queries; null = queries are not compressed."""
    qk_nope_head_dim: int | None = None
    """For MLA: channels of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: int | None = None
    """For MLA: channels that are rotated, even; all heads share those of keys."""
    v_head_dim: int | None = None
    """For MLA: channels of a head's values."""
    latent_norm_epsilon: float | None = None
    """For MLA: `norm_epsilon` of the norms of compressed queries and keys, which is 1e-6 in
    transformers whatever the other norms have (GLM-4.7-Flash); null = the same."""
    indexer_top_k: int | None = None
    """For MLA: tokens that a query attends to, chosen by the layer's indexer (sparse attention of
    DeepSeek-V3.2, "DSA"); null = all. Runs in torch's own operations, with attention=sdpa."""
    indexer_num_heads: int | None = None
    """Heads of the indexer."""
    indexer_head_dim: int | None = None
    """Channels of an indexer's head, of which `qk_rope_head_dim` are rotated."""
    indexer_rope_interleaved: bool = False
    """The indexer rotates neighbouring channels together (GLM-5), not those of two halves."""
    indexer_loss_coef: float = 0.0
    """Weight of the indexer's loss, see `model.attention.sparse`; 0 = the indexer is frozen."""
    attention: Attention = "auto"
    """Attention over packed rows: te (Transformer Engine), varlen (torch's varlen attention; bf16,
    torch 2.11 or later), sdpa (torch's SDPA per sample), or auto: the first of these that can run.
    Any other choice that cannot run is an error."""
    dtype: Dtype = "fp32"
    """Type of weights and activations; bf16 keeps main weights and gradients in fp32."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"] | None = None
    """Transformer Engine's FP8 recipe for the linear layers, or its FP4 recipe nvfp4 (Blackwell);
    rows are aligned for it. Needs a GPU, attention=te and dtype=bf16. Weights stay bf16; attention
    and the vocabulary projection do not use FP8. null = no FP8."""
    bias_activation_fusion: bool | None = None
    """Run SwiGLU forward and backward as one kernel each (torch.compile); the backward then keeps
    three values per channel instead of five. null = on CUDA."""
    gradient_accumulation_fusion: bool | None = None
    """Let the linear layers' matrix products add to the fp32 gradients. Needs CUDA, and Transformer
    Engine's layers or an extension of apex; null = where these are."""
    recompute: Recompute = "none"
    """Activations that the backward recomputes: none; full: whole layers; selective: those of
    `recompute_modules`."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """What recompute=selective recomputes: core_attn (attention without its projections), mlp
    (dense layers), moe (whole layers of experts), and with Transformer Engine's layers also
    layernorm and moe_act (the activation inside grouped experts). Recomputing fused attention alone
    frees next to nothing."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: globs of their names in the whole model, for example
    `embedding.*` or `decoder.layers.0.*`. Names are those of Megatron's local layers with every
    `attention`: a norm is `input_layernorm` or `pre_mlp_layernorm`, also where it is fused with
    the projection after it."""
    num_experts: int | None = None
    """Experts in the MLP of a layer, a multiple of layout.ep; null = a dense model."""
    moe_first_dense_layers: int = 0
    """The first layers that have a dense MLP instead of experts (DeepSeek-V3: 3)."""
    moe_top_k: int = 2
    """Experts per token (top-k). Experts have no capacity limit, so no token is dropped."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; null = the MLP's ffn_hidden_size."""
    moe_shared_ffn_hidden_size: int | None = None
    """Width inside the shared expert, which every token goes through; null = none."""
    moe_shared_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate (Qwen2-MoE)."""
    moe_inner_norms: bool = False
    """With a shared expert and norm_placement=sandwich: it and the experts have each a norm before
    and after them, and the router a norm and two scales of its own (Gemma 4, whose MLP is the
    shared expert)."""
    moe_grouped_gemm: bool | None = None
    """Run the experts of a rank as one grouped matrix product instead of one after another. Needs
    Transformer Engine's layers; null = where these are."""
    moe_permute_fusion: bool | None = None
    """Sort tokens by expert, and back, in one kernel each. Needs Transformer Engine's layers; null
    = where these are."""
    moe_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores: softmax, or sigmoids (DeepSeek-V3)."""
    moe_norm_top_k: bool = True
    """Divide the scores of a token's experts by their sum. false needs softmax scores. One expert
    per token has its score as it is."""
    moe_num_groups: int | None = None
    """Groups of experts, of which each token uses `moe_group_top_k` (DeepSeek-V3: 8); null = no
    groups."""
    moe_group_top_k: int | None = None
    """Groups of experts per token, those with the largest sums of their best `moe_group_best`
    scores."""
    moe_group_best: int | None = None
    """Experts whose scores rank their group (DeepSeek-V2: 1); null = moe_top_k / moe_group_top_k,
    Megatron-Core's number."""
    moe_route_scale: float | None = None
    """Factor of the scores of the chosen experts (DeepSeek-V3: 2.5); null = 1."""
    moe_expert_bias: bool = False
    """Choose experts by scores plus a bias per expert (DeepSeek-V3, Ernie 4.5). It changes only by
    `moe_bias_update_rate`."""
    moe_balance_loss_coef: float = 0.0
    """Weight of the load-balancing loss of each sample, see `model.experts.rows`; 0 = no such
    loss."""
    moe_z_loss_coef: float = 0.0
    """Weight of the router z-loss per token; 0 = no such loss."""
    moe_bias_update_rate: float = 0.0
    """Update step of the expert bias, which balances experts without a loss. 0 = the bias stays as
    it is, see `moe_expert_bias`."""
    mtp_num_layers: int = 0
    """Multi-token prediction layers on the last stage. Each predicts one token further ahead;
    0 = none. With `hf_path` they begin as those of the folder, which may have more; layers that are
    not trained are exported as they were."""
    mtp_loss_coef: float = 0.1
    """Weight of the mean loss of the multi-token prediction layers."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_latent_attention()
        if self.hybrid_layer_pattern is not None:
            self._check_pattern(self.hybrid_layer_pattern)

    def _check_numbers(self) -> None:
        section = self.SECTION
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if value is None:
                continue
            if str(option.type).startswith("int"):
                least = 0 if name in _FROM_ZERO else 1
                if type(value) is not int or value < least:
                    raise ConfigError(
                        f"{section}{name}={value!r}; set an integer of at least {least}"
                    )
            elif name in _ABOVE_ZERO:
                if not value > 0:
                    raise ConfigError(f"{section}{name} is {value}; set a number above 0, or null")
            # Not `value < 0`, which is false for NaN.
            elif str(option.type).startswith("float") and not value >= 0:
                raise ConfigError(f"{section}{name} is {value}; set 0 or more")

    def _check_latent_attention(self) -> None:
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if self.uses_mla and getattr(self, name) is None:
                section = self.SECTION
                raise ConfigError(
                    f"{section}kv_lora_rank is set, so {section}{name} must be; set it"
                )

    def _check_pattern(self, pattern: str) -> None:
        section = self.SECTION
        for letters in pattern.split("/"):
            unknown = sorted(set(letters) - set(NEEDED))
            if unknown or not letters:
                why = f"has {unknown[0]!r}" if unknown else "is empty"
                raise ConfigError(
                    f"{section}hybrid_layer_pattern={letters!r} {why}; set letters of "
                    f"{''.join(NEEDED)} (the keys of layout split it over stages)"
                )
            for letter, name in ((one, name) for one in letters for name in NEEDED[one]):
                if getattr(self, name) is None:
                    raise ConfigError(
                        f"{section}hybrid_layer_pattern has layers {letter}, so {section}{name} "
                        "must be set"
                    )
        if self.num_stage_layers != self.num_layers:
            raise ConfigError(
                f"{section}hybrid_layer_pattern has {self.num_stage_layers} letters and "
                f"{section}num_layers is {self.num_layers}; set num_layers={self.num_stage_layers}"
            )
        if self.moe_first_dense_layers:
            raise ConfigError(
                f"{section}moe_first_dense_layers={self.moe_first_dense_layers} with "
                f"{section}hybrid_layer_pattern, whose letters say which layers are dense; leave "
                "it out"
            )

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-latent."""
        return self.kv_lora_rank is not None

    @property
    def head_width(self) -> int:
        """Channels of one head's queries and keys, in layers that are not global."""
        if self.uses_mla:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads, in layers that are not global."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def global_heads(self) -> tuple[int, int]:
        """Width of a head in global layers, and their key and value heads."""
        width = self.global_kv_channels or self.head_width
        return width, self.global_query_groups or self.query_groups

    @property
    def has_global_heads(self) -> bool:
        """Whether global layers have other heads than local ones."""
        keys = (self.global_kv_channels, self.global_query_groups)
        return keys != (None, None) or self.global_keys_as_values

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether its rotary embedding is local."""
        return self._are_local(self.rotary_pattern or "G")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, the tokens that a token sees; None = all before it."""
        local = self._are_local(self.attention_window_pattern or "L")
        return tuple(self.attention_window if is_local else None for is_local in local)

    def _are_local(self, pattern: str) -> tuple[bool, ...]:
        """Of each layer, whether a pattern that is repeated over the layers has the letter L."""
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(self.num_layers))

    @property
    def layer_pattern(self) -> str | None:
        """The letters of the layers of a HybridModel; None for a GPTModel."""
        if self.hybrid_layer_pattern is not None:
            return self.hybrid_layer_pattern.partition("/")[0]
        if self.megatron_class != "hybrid":
            return None
        return "".join("*-" if dense else "*E" for dense in self.dense_layers)

    @property
    def mtp_pattern(self) -> str:
        """The letters of a depth of multi-token prediction in a HybridModel; "" if it has none."""
        if not self.mtp_num_layers:
            return ""
        if self.hybrid_layer_pattern is not None:
            return self.hybrid_layer_pattern.rpartition("/")[2]
        return (self.layer_pattern or "")[-2:]

    @property
    def num_stage_layers(self) -> int:
        """Layers that are split over pipeline stages."""
        return len(self.layer_pattern or "") or self.num_layers

    @property
    def num_blocks(self) -> float:
        """Layers of attention and an MLP; one of a hybrid model, which is either, is half of it."""
        return len(self.layer_pattern or "") / 2 or self.num_layers

    @property
    def dense_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether its MLP is dense; without a pattern."""
        num_dense = self.moe_first_dense_layers if self.num_experts else self.num_layers
        return tuple(layer < num_dense for layer in range(self.num_layers))

    @property
    def has_expert_bias(self) -> bool:
        """Whether experts are chosen by scores plus a bias."""
        return self.moe_expert_bias or self.moe_bias_update_rate > 0

    @property
    def dense_width(self) -> int:
        """Width inside the MLP of layers without experts."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.dense_width

    @property
    def num_ids(self) -> int:
        """Rows of the vocabulary; without `vocab_size` those of bytes."""
        return self.vocab_size or BYTE_VOCAB_SIZE
