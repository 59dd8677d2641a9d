"""Weights and floating-point operations of a transformer, from its sizes.

A multiply and an add count as two operations. Attention is causal: a sample of L tokens has L^2 / 2
pairs of tokens. Per head, each pair costs two dot products of the head width: one for the scores,
one for the values. Layers G and M of a hybrid model have no squares: their scans work in chunks of
tokens, and cost the same for each token. Nor have layers with a sliding window: each token meets
as many keys, which is more than there are in samples shorter than the window (see `at_length`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from megapack.base.arrays import Ints
from megapack.cost.stages import StageLayers, stage_layers_of
from megapack.cost.weights import (
    MAMBA_CONV_TOKENS,
    LayerParameters,
    attention_weights,
    weights_of_part,
)
from megapack.errors import ConfigError
from megapack.layout import Layout, ParallelSizes

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this: 259 becomes 384. It is a multiple of every common
tp, so that the padded size does not depend on tp."""
FLASH_WIDTH = 256
"""The widest heads of fused attention over packed rows: flash attention's, and cuDNN's."""
LAYER_LETTERS = "GM*-E"
"""Kinds of layers of a hybrid model: gated delta net, Mamba-2, attention, MLP, experts."""
# Tokens of a chunk: in fla's gated delta rule, and in mamba_ssm's scan.
DELTA_CHUNK = 64
_MAMBA_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT with grouped-query or multi-latent attention, dense or with experts; or a hybrid model.

    A model with experts may begin with dense layers, and the layers of a hybrid model have their
    letters. Methods that speak of a layer are for the kinds that `layer_kinds` gives; of a model
    that begins with dense layers they mean the others.
    """

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the feed-forward, or of one expert if `num_experts` is set."""
    num_attention_heads: int
    """Query heads."""
    vocab_size: int
    """Rows of the embedding."""
    num_query_groups: int | None = None
    """Key and value heads; as many as query heads by default."""
    kv_channels: int | None = None
    """Width of a head; hidden_size / num_attention_heads by default."""
    gated: bool = True
    """Three matrices per feed-forward (SwiGLU); two if not gated."""
    qk_layernorm: bool = False
    """Norms of each head's queries and keys, or of MLA's latents."""
    qk_layernorm_over_heads: bool = False
    """Norms of all heads' queries, and of all heads' keys, with a weight per channel (OLMo-2)."""
    norms_per_part: int = 1
    """Norms of attention, or of an MLP, in the residual stream; 2 = before and after (Gemma)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    linear_bias: bool = False
    """Biases of all linear layers and of routers (gpt-oss)."""
    attention_sinks: bool = False
    """A logit per head in the softmax of attention (gpt-oss)."""
    attention_window: int | None = None
    """Keys that a token meets in layers with a sliding window; None = all before it."""
    attention_window_pattern: str | None = None
    """L for a layer with the window, G for one without, repeated over the layers; None = all have
    it."""
    value_layernorm: bool = False
    """Norms of each head's values, without weights (Gemma 4)."""
    keys_as_values: bool = False
    """No projection to values, which are the keys (Gemma 4's global layers)."""
    global_kv_channels: int | None = None
    """Width of a head in global layers; None = as in the others."""
    global_query_groups: int | None = None
    """Key and value heads of global layers; None = as in the others."""
    global_keys_as_values: bool = False
    """`keys_as_values` of global layers."""
    global_pattern: str | None = None
    """G for a global layer, L for another, repeated over the layers; None = all are alike."""
    kv_lora_rank: int | None = None
    """Channels of the latent of keys and values: multi-latent attention (MLA, DeepSeek); None =
    grouped queries. MLA needs the three widths below."""
    q_lora_rank: int | None = None
    """Channels of the latent of queries in MLA; None = queries are projected directly."""
    qk_nope_head_dim: int | None = None
    """Width of an MLA head's queries and keys that is not rotated."""
    qk_rope_head_dim: int | None = None
    """Width of an MLA head's queries and keys that is rotated; all heads share these keys."""
    v_head_dim: int | None = None
    """Width of an MLA head's values."""
    indexer_num_heads: int | None = None
    """Heads of the indexer that chooses keys in MLA (DeepSeek-V3.2); None = all keys count. All
    squares are counted: the scores of all keys are computed before and after the choice."""
    indexer_head_dim: int | None = None
    """Width of an indexer's head."""
    num_experts: int | None = None
    """Experts per layer; None = a dense model."""
    experts_per_token: int = 1
    """Experts that a token is routed to (top-k)."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of the shared expert, which every token goes through; 0 = no shared expert."""
    shared_expert_gate: bool = False
    """A gate of one number per token on the shared expert (Qwen2-MoE)."""
    expert_inner_norms: bool = False
    """Norms before and after the shared expert and the experts each, one in the router, and scales
    of its input and of its scores (Gemma 4)."""
    first_dense_layers: int = 0
    """Layers at the beginning that have a dense feed-forward instead of experts."""
    dense_ffn_hidden_size: int | None = None
    """Width of their feed-forward, and of that of layers - in a hybrid model with experts."""
    attention_output_gate: bool = False
    """A gate of each head's output, projected as queries are (Qwen3-Next)."""
    layer_pattern: str | None = None
    """Layers of a hybrid model, a letter each: G gated delta net, M Mamba-2, * attention, - MLP, E
    experts; None = each layer is attention and then an MLP or experts."""
    linear_num_key_heads: int | None = None
    """Layers G: heads of queries and keys."""
    linear_num_value_heads: int | None = None
    """Layers G: heads of values."""
    linear_key_head_dim: int | None = None
    """Layers G: width of a head's queries and keys."""
    linear_value_head_dim: int | None = None
    """Layers G: width of a head's values."""
    linear_conv_kernel_dim: int = 4
    """Layers G: tokens that the convolution sees."""
    mamba_num_heads: int | None = None
    """Layers M: heads."""
    mamba_head_dim: int = 64
    """Layers M: width of a head."""
    mamba_state_dim: int = 128
    """Layers M: width of the state."""
    mamba_num_groups: int = 8
    """Layers M: groups of heads."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = 0 if name in ("shared_expert_ffn_hidden_size", "first_dense_layers") else 1
            is_number = type(field.default) is not bool and not name.endswith("pattern")
            if is_number and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name}={value!r}; set an integer of at least {least}")
        widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        missing = [name for name in widths if getattr(self, name) is None]
        if self.kv_lora_rank is not None and missing:
            raise ConfigError(f"kv_lora_rank={self.kv_lora_rank} without {missing[0]}; set it too")
        if self.first_dense_layers and None in (self.num_experts, self.dense_ffn_hidden_size):
            raise ConfigError(
                f"first_dense_layers={self.first_dense_layers} needs num_experts and "
                "dense_ffn_hidden_size; set them too"
            )
        if self.layer_pattern is not None:
            self._check_pattern(self.layer_pattern)

    def _check_pattern(self, pattern: str) -> None:
        unknown = sorted(set(pattern) - set(LAYER_LETTERS))
        if unknown or len(pattern) != self.num_layers:
            raise ConfigError(
                f"layer_pattern={pattern!r} with num_layers={self.num_layers}; set as many letters "
                f"of {LAYER_LETTERS}"
            )
        needed = {
            "G": ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"),
            "M": ("mamba_num_heads",),
            "E": ("num_experts",),
        }
        for letter, names in needed.items():
            for name in (f"linear_{n}" if letter == "G" else n for n in names):
                if letter in pattern and getattr(self, name) is None:
                    raise ConfigError(f"layer_pattern has layers {letter}, but no {name}; set it")
        if self.first_dense_layers:
            raise ConfigError(
                f"first_dense_layers={self.first_dense_layers} with layer_pattern={pattern!r}, "
                "whose letters say which layers are dense; set one of them"
            )

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-latent."""
        return self.kv_lora_rank is not None

    @property
    def head_width(self) -> int:
        """Channels of a head's queries and keys; without MLA also of its values."""
        if self.uses_mla:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_width(self) -> int:
        """Channels of a head's values."""
        return self.v_head_dim or self.head_width

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.qk_rope_head_dim or self.head_width

    @property
    def sublayers(self) -> str:
        """Letters of what a layer runs one after the other, each behind a norm of its own."""
        if self.layer_pattern is not None:
            return self.layer_pattern
        return "*-" if self.num_experts is None else "*E"

    @property
    def delta_widths(self) -> tuple[int, int]:
        """Channels of the queries, and of the values, of a layer G."""
        keys = (self.linear_num_key_heads or 0) * (self.linear_key_head_dim or 0)
        return keys, (self.linear_num_value_heads or 0) * (self.linear_value_head_dim or 0)

    @property
    def mamba_widths(self) -> tuple[int, int]:
        """Channels of the heads of a layer M, and of B or C."""
        heads = (self.mamba_num_heads or 0) * self.mamba_head_dim
        return heads, self.mamba_num_groups * self.mamba_state_dim

    def max_width(self, layout: ParallelSizes) -> int | None:
        """The most DP ranks that a row may lie over; None without layers G and M, and 0 if tp * cp
        alone does not divide their heads.

        All-to-alls of these layers give each GPU of a row all of its tokens in some of the heads.

        Args:
            layout: gives tp and cp.
        """
        pattern = self.layer_pattern or ""
        heads = [self.linear_num_key_heads, self.linear_num_value_heads] if "G" in pattern else []
        heads += [self.mamba_num_heads] if "M" in pattern else []
        if not heads:
            return None
        groups = self.mamba_num_groups if "M" in pattern else 1
        width = 1
        while self._divides_heads(heads, groups, layout, width):
            width *= 2
        return width // 2

    def _divides_heads(
        self, heads: list[int | None], groups: int, layout: ParallelSizes, width: int
    ) -> bool:
        size = layout.cp * width
        own_groups = groups // layout.tp if groups > 1 else 1
        if groups > 1 and groups % layout.tp:
            return False
        # Groups are copied to where there are more GPUs than groups.
        fits = own_groups % size == 0 or size % own_groups == 0
        return fits and not any((number or 1) % (layout.tp * size) for number in heads)

    def layer_kinds(
        self, first: int = 0, num_layers: int | None = None
    ) -> Iterator[tuple[ModelSizes, int]]:
        """The kinds of layers among some that follow each other, each with how many there are.

        Args:
            first: the first of these layers, from 0.
            num_layers: how many; None = all from `first` on.

        Returns:
            Sizes of a model that has only layers of this kind, and their number, which is not 0.
        """
        end = self.num_layers if num_layers is None else first + num_layers
        if self.layer_pattern is not None:
            letters = self.layer_pattern[first:end]
            for letter in dict.fromkeys(letters):
                yield self._by_letter[letter], letters.count(letter)
            return
        layers = range(first, end)
        kinds = Counter(
            (layer >= self.first_dense_layers, self._window(layer), self._is_global(layer))
            for layer in layers
        )
        for key, count in kinds.items():
            yield _kind(self, *key), count

    def _is_global(self, layer: int) -> bool:
        """Whether a layer, by its number from 0, is global."""
        pattern = self.global_pattern or "L"
        return pattern[layer % len(pattern)] == "G"

    def _heads(self, is_global: bool) -> dict[str, Any]:
        """The fields of attention heads of layers that are all global, or all not."""
        own: dict[str, Any] = {
            "global_kv_channels": None,
            "global_query_groups": None,
            "global_keys_as_values": False,
            "global_pattern": None,
        }
        if is_global:
            own["kv_channels"] = self.global_kv_channels or self.kv_channels
            own["num_query_groups"] = self.global_query_groups or self.num_query_groups
            own["keys_as_values"] = self.global_keys_as_values
        return own

    def _window(self, layer: int) -> int | None:
        """The window of a layer, by its number from 0."""
        pattern = self.attention_window_pattern or "L"
        return self.attention_window if pattern[layer % len(pattern)] == "L" else None

    def at_length(self, length: float) -> ModelSizes:
        """The same with the keys that tokens of such samples meet in a window, on average.

        Of L tokens the first w - 1 meet fewer than w keys: w L - w (w - 1) / 2 pairs in all, which
        is 96 keys per token at w = 128 and L = 256. Samples that do not reach the window have none.
        """
        window = self.attention_window
        if window is None:
            return self
        if window >= length:
            return replace(self, attention_window=None, attention_window_pattern=None)
        return replace(self, attention_window=round(window - window * (window - 1) / (2 * length)))

    @cached_property
    def _by_letter(self) -> dict[str, ModelSizes]:
        """Sizes of a hybrid model with one layer, for each of its letters. Made once: a sweep of
        layouts asks for them 100,000 times."""
        return {
            letter: replace(
                self._dense() if letter == "-" else self, layer_pattern=letter, num_layers=1
            )
            for letter in dict.fromkeys(self.layer_pattern or "")
        }

    def _dense(self) -> ModelSizes:
        """The same with a dense feed-forward in place of experts."""
        pattern = self.layer_pattern
        return replace(
            self,
            num_experts=None,
            ffn_hidden_size=self.dense_ffn_hidden_size or self.ffn_hidden_size,
            shared_expert_ffn_hidden_size=0,
            shared_expert_gate=False,
            expert_inner_norms=False,
            first_dense_layers=0,
            layer_pattern=None if pattern is None else pattern.replace("E", "-"),
        )

    def layer_parameters(self, layer: int = 0, frozen: Sequence[str] = ()) -> LayerParameters:
        """Numbers of weights of one layer, by how they are split over GPUs.

        Args:
            layer: its number in the whole model, which globs may name.
            frozen: globs of names, as in `ModelConfig.freeze`; what they match is not counted.
        """
        counts = dict.fromkeys(LayerParameters._fields, 0)
        for letter in self.sublayers:
            for weight in weights_of_part(self, letter):
                counts[weight.kind] += weight.size * weight.num_left(layer, frozen)
        return LayerParameters(**counts)

    def mixer_weights(self, letter: str) -> int:
        """Weights of the two projections of a layer G or M."""
        if letter == "G":
            keys, out = self.delta_widths
            # Queries, keys, values and gates of their width, two scalars per head of values.
            inner = 2 * keys + 2 * out + 2 * (self.linear_num_value_heads or 0)
        else:
            out, states = self.mamba_widths
            inner = 2 * out + 2 * states + (self.mamba_num_heads or 0)
        return self.hidden_size * (inner + out)

    @property
    def query_width(self) -> int:
        """Channels of the projection to queries, and to gates of heads."""
        return (1 + self.attention_output_gate) * self.num_attention_heads * self.head_width

    def _attention_products(self) -> int:
        """Weights of the attention's matrices."""
        named = attention_weights(self)
        return sum(w.size for w in named if ".weight" in w.name and "norm" not in w.name)

    @property
    def indexer_weights(self) -> int:
        """Weights of the indexer's matrices."""
        queries = self.index_width - (self.indexer_head_dim or 0)
        weights = (self.q_lora_rank or 0) * queries
        return weights + self.hidden_size * (self.index_width - queries + self._index_heads)

    @property
    def _index_heads(self) -> int:
        return self.indexer_num_heads or 0

    @property
    def index_width(self) -> int:
        """Channels of the indexer's queries, and of its key."""
        return (self._index_heads + 1) * (self.indexer_head_dim or 0)

    def layer_flops_per_token(self) -> float:
        """Operations of one layer's matrices and scans per token, forward."""
        mixer = sum(self._mixer_flops(letter) for letter in self.sublayers)
        return mixer + self.mlp_flops_per_token()

    def _mixer_flops(self, letter: str) -> float:
        """Operations per token of a part that mixes tokens, without the squares of attention."""
        if letter == "*":
            keys = (self.attention_window or 0) * 2 * self._flops_per_key()
            return 2 * self._attention_products() + keys
        if letter == "G":
            keys, values = self.delta_widths
            heads = self.linear_num_value_heads or 0
            key, value = self.linear_key_head_dim or 0, self.linear_value_head_dim or 0
            conv = 2 * self.linear_conv_kernel_dim * (2 * keys + values)
            # In a chunk: products of keys with keys and queries, the inverse times keys and values,
            # scores times values; then the state is read twice and written.
            chunk = 2 * DELTA_CHUNK * (2 * key + (key + value) + value)
            scan = heads * (chunk + 3 * 2 * key * value)
            return 2 * self.mixer_weights(letter) + conv + scan
        if letter == "M":
            inner, states = self.mamba_widths
            conv = 2 * MAMBA_CONV_TOKENS * (inner + 2 * states)
            # In a chunk: C times B per group, scores times x; then the state is read and written.
            scan = 2 * _MAMBA_CHUNK * (states + inner) + 2 * 2 * inner * self.mamba_state_dim
            return 2 * self.mixer_weights(letter) + conv + scan
        return 0.0

    def mlp_flops_per_token(self) -> float:
        """Operations of one layer's MLP, or of its router and experts, per token, forward."""
        if not set(self.sublayers) & set("-E"):
            return 0.0
        matrices = 3 if self.gated else 2
        width = self.ffn_hidden_size
        router = 0
        if self.num_experts is not None:
            width = width * self.experts_per_token + self.shared_expert_ffn_hidden_size
            router = 2 * self.hidden_size * (self.num_experts + int(self.shared_expert_gate))
        return float(router + 2 * self.hidden_size * matrices * width)

    def layer_flops_per_token_sq(self) -> float:
        """Operations of one layer's attention per squared token of a sample, forward."""
        has_squares = "*" in self.sublayers and self.attention_window is None
        return float(self._flops_per_key()) if has_squares else 0.0

    def _flops_per_key(self) -> int:
        """Half of the operations of a pair of tokens; a sample of L tokens has L^2 / 2 pairs."""
        index = self._index_heads * (self.indexer_head_dim or 0)
        return self.num_attention_heads * (self.head_width + self.value_width) + index

    def layer_attention_tokens(self, tokens: float) -> float:
        """Operations of one layer's attention per token that meets so many keys, forward."""
        return 2 * tokens * self._flops_per_key() if "*" in self.sublayers else 0.0

    def layer_cp_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values in one layer, 16-bit, which ranks that share a row
        exchange."""
        if "*" not in self.sublayers:
            return 0.0
        groups = self.num_query_groups or self.num_attention_heads
        heads = self.num_attention_heads if self.uses_mla else groups
        return 2 * heads * (self.head_width + self.value_width)

    def layer_tp_bytes_per_token(self, tp: int) -> float:
        """Bytes per token that tensor parallelism moves per GPU in one layer's forward, 16-bit.

        An all-reduce of the hidden states per part of a layer, each 2 * (tp - 1) / tp times their
        bytes on a ring. Sequence parallelism replaces each by an all-gather and a reduce-scatter of
        the same bytes.
        """
        return len(self.sublayers) * 2 * (tp - 1) / tp * 2 * self.hidden_size

    def head_flops_per_token(self) -> float:
        """Operations of the vocabulary projection per token, forward."""
        return 2.0 * self.hidden_size * self.vocab_size

    def embedding_flops_per_token(self) -> float:
        """Operations of the embedding lookup per token, counted as one addition per channel."""
        return float(self.hidden_size)

    def stage_weights(
        self,
        layout: Layout,
        mean_length: float,
        *,
        head_factor: float = 1.0,
        stage_layers: StageLayers | None = None,
    ) -> tuple[float, ...]:
        """Cost of each of the pp*vpp chunks divided by their mean.

        The first chunk also has the embedding, the last one the vocabulary head. Where chunks have
        `square_factors`, it is the cost without attention's squares.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.
            head_factor: see `CostModel.from_model`.
            stage_layers: layers of each chunk; None = equally many.

        Raises:
            ConfigError: the layers do not divide into chunks, or `stage_layers` does not fit.
        """
        split = stage_layers_of(self.num_layers, layout, stage_layers)
        if self._squares_differ(split):
            mean_length = 0.0
        cost = [
            sum(kind.layer_cost(mean_length) * n for kind, n in self.layer_kinds(first, layers))
            for first, layers in zip(split.offsets, split.num_layers, strict=True)
        ]
        cost[0] += self.embedding_flops_per_token()
        cost[-1] += head_factor * self.head_flops_per_token()
        mean = sum(cost) / len(cost)
        return tuple(c / mean for c in cost)

    def square_factors(
        self,
        layout: Layout,
        *,
        head_factor: float = 1.0,
        stage_layers: StageLayers | None = None,
    ) -> tuple[float, ...] | None:
        """`CostModel.square_factors`; None if all chunks have the same share of attention layers.

        Args:
            head_factor, stage_layers: see `stage_weights`.

        Raises:
            ConfigError: see `stage_weights`.
        """
        split = stage_layers_of(self.num_layers, layout, stage_layers)
        if not self._squares_differ(split):
            return None
        weights = self.stage_weights(layout, 0.0, head_factor=head_factor, stage_layers=split)
        squares = self._chunk_squares(split)
        mean = sum(squares) / len(squares)
        return tuple(own / mean / w for own, w in zip(squares, weights, strict=True))

    def _squares_differ(self, split: StageLayers) -> bool:
        """Whether attention is a larger part of some chunks' layers than of others'."""
        squares = self._chunk_squares(split)
        total = sum(squares)
        chunks = zip(squares, split.num_layers, strict=True)
        return any(own * split.total != total * layers for own, layers in chunks)

    def _chunk_squares(self, split: StageLayers) -> list[float]:
        """Operations of each chunk per squared token, whole numbers."""
        return [
            sum(kind.layer_flops_per_token_sq() * n for kind, n in self.layer_kinds(first, layers))
            for first, layers in zip(split.offsets, split.num_layers, strict=True)
        ]

    def balanced_stage_layers(self, layout: Layout, mean_length: float) -> StageLayers:
        """The split whose costliest chunk costs the least, with the embedding and the head.

        What first dense layers cost more or less than the others counts on the first chunk.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.

        Raises:
            ConfigError: fewer layers than chunks.
        """
        patterns = (self.attention_window, self.layer_pattern, self.global_pattern)
        if any(pattern is not None for pattern in patterns):
            sizes = self.at_length(mean_length)
            kinds = (kind for i in range(self.num_layers) for kind, _ in sizes.layer_kinds(i, 1))
            return StageLayers.of_costs(
                [kind.layer_cost(mean_length) for kind in kinds],
                pp=layout.pp,
                vpp=layout.vpp,
                embedding=self.embedding_flops_per_token(),
                head=self.head_flops_per_token(),
            )
        layer = self.layer_cost(mean_length)
        extra = sum(n * (kind.layer_cost(mean_length) - layer) for kind, n in self.layer_kinds())
        return StageLayers.balanced(
            self.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            embedding=(extra + self.embedding_flops_per_token()) / layer,
            head=self.head_flops_per_token() / layer,
        )

    def layer_cost(self, mean_length: float) -> float:
        """Operations of one layer's forward per token of samples of this length."""
        return self.layer_flops_per_token() + self.layer_flops_per_token_sq() * mean_length


@lru_cache(maxsize=256)
def _kind(sizes: ModelSizes, has_experts: bool, window: int | None, is_global: bool) -> ModelSizes:
    """Sizes of a model that has only layers of this kind. `tune` may ask 130,000 times."""
    kind = replace(sizes, first_dense_layers=0) if has_experts else sizes._dense()
    heads = kind._heads(is_global) if sizes.global_pattern is not None else {}
    return replace(kind, attention_window=window, attention_window_pattern=None, **heads)


def typical_length(lengths: Ints) -> float:
    """Mean over tokens of their sample's length; 250 for samples of 100 and 300 tokens."""
    return float((lengths**2).sum() / lengths.sum())
