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
    "+": ("kv_lora_rank",),
    "D": ("indexer_top_k",),
    "-": (),
    "E": ("num_experts",),
}
"""Letters of `hybrid_layer_pattern` -> options that such a layer needs: gated delta net, Mamba-2,
attention, multi-latent and sparse attention, MLP, experts."""
AS_ATTENTION = str.maketrans("+D", "**")
"""Letters of attention -> *: it is of one kind in all layers, and the options say which."""
NOT_IN_FOLDERS = (
    *("hf_path", "megatron_class", "attention", "dtype", "fp8", "init_std", "freeze", "vision"),
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
    """A Hugging Face folder, whose config.json gives the keys of the architecture. A key set here
    too must be equal."""
    num_layers: int = 4
    """Transformer layers; a multiple of pp * vpp, or split by `layout`. Each letter of a pattern is
    one."""
    megatron_class: Literal["auto", "gpt", "hybrid"] | None = "auto"
    """GPTModel or HybridModel (Megatron-Core `0.18`); auto or null = hybrid with a pattern and
    since `0.19`."""
    hybrid_layer_pattern: str | None = None
    """A letter per layer: G gated delta net, M Mamba-2, * attention, - MLP, E experts; after a `/`
    the MTP layers, as in `GE*E/*E`."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Query heads; a multiple of tp."""
    num_query_groups: int | None = None
    """Key and value heads; null = one per query head."""
    kv_channels: int | None = None
    """Width of a head, even; null = hidden_size / num_attention_heads."""
    qk_layernorm: bool = False
    """Normalise queries and keys before their rotation: per head (Qwen3), or compressed
    (DeepSeek-V3)."""
    qk_layernorm_over_heads: bool = False
    """With `qk_layernorm`: over all heads together (OLMo-2)."""
    qk_layernorm_after_rotation: bool = False
    """With `qk_layernorm`: after the rotation (Hunyuan)."""
    value_layernorm: bool = False
    """Normalise each head's values, without weights (Gemma 4)."""
    global_kv_channels: int | None = None
    """With `rotary_pattern`: width of a head in global layers; null = `kv_channels`."""
    global_query_groups: int | None = None
    """With `rotary_pattern`: key and value heads of global layers; null = `num_query_groups`."""
    global_keys_as_values: bool = False
    """With `rotary_pattern`: keys of global layers, before norm and rotation, are their values
    (Gemma 4)."""
    attention_scale: float | None = None
    """Factor of the scores before the softmax; null = 1 / sqrt(head width)."""
    attention_score_cap: float | None = None
    """Scores s become cap * tanh(s / cap) (Gemma 2: 50), in torch's own operations."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen2)."""
    ffn_hidden_size: int | None = None
    """Width inside a dense MLP; null = 4 * hidden_size."""
    vocab_size: int | None = None
    """Rows of the embedding before padding; null = the tokenizer's."""
    max_position_embeddings: int = 4096
    """Tokens of the longest sample."""
    rotary_base: int = 10000
    """Base of the rotary wavelengths."""
    rotary_percent: float = 1.0
    """Part of a head's channels that is rotated, in (0, 1]."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels as pairs (Ernie)."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Longer wavelengths of the rotary embedding; see `RopeScaling`."""
    local_rotary_base: int | None = None
    """`rotary_base` of local layers, which is not stretched (Gemma 3); null = no local layers."""
    rotary_pattern: str | None = None
    """With `local_rotary_base`: L local, G global, repeated over the layers (Gemma 3: LLLLLG)."""
    position_embedding_type: Literal["rope", "none"] = "rope"
    """none: attention without positions (Nemotron-H)."""
    attention_window: int | None = None
    """Tokens that a token sees in windowed layers, itself included; null = all before it."""
    attention_window_pattern: str | None = None
    """L windowed, G not, repeated over the layers (gpt-oss: LG); null = all are windowed."""
    attention_sinks: bool = False
    """A learned logit per head in attention's softmax (gpt-oss)."""
    attention_output_gate: bool = False
    """A sigmoid gate on each head's output (Qwen3-Next)."""
    linear_num_key_heads: int | None = None
    """Layers G: heads of queries and keys, a multiple of tp * cp."""
    linear_num_value_heads: int | None = None
    """Layers G: heads of values, a multiple of `linear_num_key_heads`."""
    linear_key_head_dim: int | None = None
    """Layers G: channels of a query or key head."""
    linear_value_head_dim: int | None = None
    """Layers G: channels of a value head."""
    linear_conv_kernel_dim: int = 4
    """Layers G: tokens that the convolution sees."""
    mamba_num_heads: int | None = None
    """Layers M: heads, a multiple of tp * cp."""
    mamba_head_dim: int = 64
    """Layers M: channels of a head."""
    mamba_state_dim: int = 128
    """Layers M: channels of the state."""
    mamba_num_groups: int = 8
    """Layers M: groups of heads that share B and C; a multiple of tp."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """The norm of every layer."""
    norm_epsilon: float = 1e-5
    """Added to a norm's mean square."""
    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight (Qwen3-Next), except inside layers G and M."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms of inputs (pre), of what is added to the residual stream (post: OLMo-2), or of both
    (sandwich: Gemma)."""
    gated_linear_unit: bool = True
    """A gate in the MLP (SwiGLU)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "squared_relu", "quick_gelu"] | None = None
    """Of the MLP; null = silu with a gate, gelu without."""
    activation_clamp: float | None = None
    """With quick_gelu: limit of the gate and of what it multiplies (gpt-oss: 7)."""
    glu_linear_offset: float = 0.0
    """With quick_gelu: added to what the gate multiplies (gpt-oss: 1)."""
    layer_scalars: bool = False
    """Multiply a layer's result by a number that is not trained (Gemma 4)."""
    linear_bias: bool = False
    """Biases of all linear layers and routers (gpt-oss)."""
    scale_embeddings: bool = False
    """Multiply input embeddings by sqrt(hidden_size) (Gemma)."""
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap) (Gemma 2: 30)."""
    untie_embeddings: bool = False
    """A separate output matrix."""
    kv_lora_rank: int | None = None
    """Channels of a token's compressed keys and values (multi-latent attention, MLA); null =
    grouped queries."""
    q_lora_rank: int | None = None
    """MLA: channels of compressed queries; null = not compressed."""
    qk_nope_head_dim: int | None = None
    """MLA: channels of a head that are not rotated."""
    qk_rope_head_dim: int | None = None
    """MLA: channels that are rotated, even."""
    v_head_dim: int | None = None
    """MLA: channels of a value head."""
    latent_norm_epsilon: float | None = None
    """MLA: `norm_epsilon` of compressed queries and keys; null = the same."""
    indexer_top_k: int | None = None
    """MLA: tokens that a query attends to, chosen by an indexer (DeepSeek-V3.2); null = all. Runs
    in torch's own operations."""
    indexer_num_heads: int | None = None
    """Heads of the indexer."""
    indexer_head_dim: int | None = None
    """Channels of an indexer's head."""
    indexer_rope_interleaved: bool = False
    """The indexer rotates neighbouring channels as pairs (GLM-5)."""
    indexer_loss_coef: float = 0.0
    """Weight of the indexer's loss; 0 = the indexer is frozen."""
    attention: Attention = "auto"
    """Kernel of packed rows: te (Transformer Engine), varlen (torch's; bf16, torch `2.11` or
    later), sdpa (torch's, per sample). auto: the first that can run."""
    dtype: Dtype = "fp32"
    """Of weights and activations; bf16 keeps main weights and gradients in fp32."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"] | None = None
    """Transformer Engine's recipe of the linear layers; nvfp4 is FP4. Needs a GPU, attention=te and
    dtype=bf16. Weights stay bf16; attention and the vocabulary projection stay as they are."""
    bias_activation_fusion: bool | None = None
    """SwiGLU as one kernel each way, which keeps less for the backward; null = on CUDA."""
    gradient_accumulation_fusion: bool | None = None
    """Matrix products add to the fp32 gradients. Needs CUDA, and Transformer Engine's layers or
    apex; null = where these are."""
    recompute: Recompute = "none"
    """Activations that the backward recomputes: of whole layers (full), or of `recompute_modules`
    (selective)."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """core_attn: attention without projections. mlp: dense layers. moe: layers of experts. With
    Transformer Engine's layers also layernorm, and moe_act inside grouped experts."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that are not trained, such as `embedding.*` or `decoder.layers.0.*`, in
    the names of Megatron's local layers. Those that begin with `visual.` are of the tower:
    `visual.blocks.*`, `visual.merger.*`, `visual.deepstack_merger_list.*`."""
    vision: Literal["off", "frozen", "train"] = "off"
    """The folder's tower for images; off: its text part alone, and an export copies the tower."""
    num_experts: int | None = None
    """Experts of a layer, a multiple of layout.ep; null = a dense model."""
    moe_first_dense_layers: int = 0
    """First layers without experts (DeepSeek-V3: 3)."""
    moe_top_k: int = 2
    """Experts per token. No token is dropped."""
    moe_ffn_hidden_size: int | None = None
    """Width inside an expert; null = ffn_hidden_size."""
    moe_latent_size: int | None = None
    """Width of tokens at experts, by projections (Nemotron-3 Super); null = hidden_size."""
    moe_shared_ffn_hidden_size: int | None = None
    """Width inside the shared expert; null = none."""
    moe_shared_gate: bool = False
    """A sigmoid gate on the shared expert's output (Qwen2-MoE)."""
    moe_inner_norms: bool = False
    """With norm_placement=sandwich: norms of the shared expert, of the experts and of the router
    (Gemma 4)."""
    moe_grouped_gemm: bool | None = None
    """A rank's experts as one grouped matrix product. Needs Transformer Engine's layers; null =
    where these are."""
    moe_permute_fusion: bool | None = None
    """Sort tokens by expert in one kernel. Needs Transformer Engine's layers; null = where these
    are."""
    moe_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores from the router's logits."""
    moe_norm_top_k: bool = True
    """Divide the scores of a token's experts by their sum. false needs softmax."""
    moe_num_groups: int | None = None
    """Groups of experts, of which a token uses `moe_group_top_k` (DeepSeek-V3: 8)."""
    moe_group_top_k: int | None = None
    """Groups per token, those with the largest sums of their best `moe_group_best` scores."""
    moe_group_best: int | None = None
    """Experts whose scores rank their group (DeepSeek-V2: 1); null = moe_top_k /
    moe_group_top_k."""
    moe_route_scale: float | None = None
    """Factor of the chosen experts' scores (DeepSeek-V3: `2.5`); null = 1."""
    moe_expert_bias: bool = False
    """Choose experts by scores plus a bias per expert (DeepSeek-V3)."""
    moe_balance_loss_coef: float = 0.0
    """Weight of each sample's load-balancing loss (`seq_aux_loss`)."""
    moe_z_loss_coef: float = 0.0
    """Weight of the router z-loss per token."""
    moe_bias_update_rate: float = 0.0
    """Update step of the expert bias; 0 = the bias stays."""
    mtp_num_layers: int = 0
    """Multi-token prediction (MTP) layers to train, on the last stage. An export copies the
    folder's others."""
    mtp_loss_coef: float = 0.1
    """Weight of the mean loss of the MTP layers."""

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
        count = len(pattern.partition("/")[0])
        if count != self.num_layers:
            raise ConfigError(
                f"{section}hybrid_layer_pattern has {count} letters and "
                f"{section}num_layers is {self.num_layers}; set num_layers={count}"
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
        """The letters of the layers, of `NEEDED` but + and D; None if layers are whole blocks."""
        pattern = self.hybrid_layer_pattern
        return None if pattern is None else pattern.partition("/")[0].translate(AS_ATTENTION)

    @property
    def mtp_pattern(self) -> str:
        """The letters of a depth of multi-token prediction; "" without a pattern."""
        pattern = self.hybrid_layer_pattern or ""
        return pattern.rpartition("/")[2].translate(AS_ATTENTION) if self.mtp_num_layers else ""

    @property
    def mlp_letters(self) -> str:
        """A letter for each layer: a pattern's own, or the one of a block's MLP, - or E."""
        num_dense = self.moe_first_dense_layers if self.num_experts else self.num_layers
        return self.layer_pattern or ("-" * num_dense).ljust(self.num_layers, "E")

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
    def routed_width(self) -> int:
        """Channels of a token as experts get and give it."""
        return self.moe_latent_size or self.hidden_size

    @property
    def num_ids(self) -> int:
        """Rows of the vocabulary; without `vocab_size` those of bytes."""
        return self.vocab_size or BYTE_VOCAB_SIZE
