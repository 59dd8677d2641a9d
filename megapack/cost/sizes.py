"""What a model's sizes decide: the kinds of its layers, what they cost, and their stages.

A sliding window costs as many keys as a token meets on average (see `layer_kinds`); all else is in
`layers` and `weights`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapack.base.arrays import Ints
from megapack.cost.layers import LayerKind
from megapack.cost.options import ModelOptions
from megapack.cost.stages import StageLayers, stage_layers_of
from megapack.layout import Layout, ParallelSizes

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this: 259 becomes 384. It is a multiple of every common
tp, so that the padded size does not depend on tp."""
FLASH_WIDTH = 256
"""The widest heads of fused attention over packed rows: flash attention's, and cuDNN's."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes(ModelOptions):
    """A GPT with grouped-query or multi-latent attention, dense or with experts; or a hybrid model.

    Of its options those count that decide weights, operations and bytes; the others have no effect.
    """

    def divided(self) -> dict[str, tuple[int, str]]:
        """What a layout divides: name -> (size, the ranks that divide it: tp, ep or etp).

        >>> ModelSizes(num_experts=8, num_query_groups=2).divided()["model.num_experts=8"]
        (8, 'ep')
        """
        shared = self.moe_shared_ffn_hidden_size
        has_dense = "-" in self.mlp_letters
        sizes = (
            ("model.num_attention_heads=", self.num_attention_heads, "tp"),
            ("model.num_query_groups=", self.query_groups, "tp"),
            ("model.global_query_groups=", self.global_heads[1], "tp"),
            ("model.moe_shared_ffn_hidden_size=", shared, "tp"),
            ("model.ffn_hidden_size=", self.dense_width if has_dense else None, "tp"),
            ("the experts' width ", self.expert_width if self.num_experts else None, "etp"),
        )
        found = {f"{name}{size}": (size, by) for name, size, by in sizes if size is not None}
        # Without experts there is nothing that several ranks could hold parts of.
        return found | {f"model.num_experts={self.num_experts}": (self.num_experts or 1, "ep")}

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
        if groups > 1 and groups % layout.tp:
            return 0
        own_groups = groups // layout.tp if groups > 1 else 1
        width, size = 1, layout.cp
        # Groups are copied to where there are more GPUs than groups.
        while (own_groups % size == 0 or size % own_groups == 0) and not any(
            (number or 1) % (layout.tp * size) for number in heads
        ):
            width, size = 2 * width, 2 * size
        return width // 2

    def layer_kinds(
        self,
        first: int = 0,
        num_layers: int | None = None,
        *,
        mean_length: float | None = None,
        attention_factor: float = 1.0,
    ) -> Iterator[tuple[LayerKind, int]]:
        """The kinds of layers among some that follow each other, each with their number, not 0.

        Args:
            first: the first of these layers, from 0.
            num_layers: how many; None = all from `first` on.
            mean_length: tokens of the samples whose tokens meet the keys of a window: of L tokens
                the first w - 1 meet fewer than w keys, w L - w (w - 1) / 2 pairs in all, which is
                96 keys per token at w = 128 and L = 256. Samples that do not reach the window have
                none. None = each token meets w keys.
            attention_factor: see `LayerKind`.
        """
        end = self.num_layers if num_layers is None else first + num_layers
        window = _keys_met(self.attention_window, mean_length)
        pattern = self.layer_pattern
        if pattern is not None:
            for letter, count in Counter(pattern[first:end]).items():
                yield LayerKind(self, letter, window, False, attention_factor), count
            return
        windows, rotary = self.attention_window_pattern or "L", self.rotary_pattern or "L"
        kinds = Counter(
            (
                f"*{self.mlp_letters[layer]}",
                window if windows[layer % len(windows)] == "L" else None,
                self.has_global_heads and rotary[layer % len(rotary)] == "G",
            )
            for layer in range(first, end)
        )
        for key, count in kinds.items():
            yield LayerKind(self, *key, attention_factor), count

    @property
    def last_kind(self) -> LayerKind:
        """The last layer."""
        ((kind, _),) = self.layer_kinds(self.num_layers - 1, 1)
        return kind

    def head_flops_per_token(self) -> float:
        """Operations of the vocabulary projection per token, forward."""
        return 2.0 * self.hidden_size * self.num_ids

    def embedding_flops_per_token(self) -> float:
        """Operations of the embedding lookup per token, counted as one addition per channel."""
        return float(self.hidden_size)

    def chunk_weights(
        self,
        layout: Layout,
        mean_length: float,
        *,
        head_factor: float = 1.0,
        attention_factor: float = 1.0,
        stage_layers: StageLayers | None = None,
    ) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
        """`stage_weights` and `square_factors` of a `CostModel`.

        The weights are the cost of each of the pp*vpp chunks divided by their mean. The first chunk
        also has the embedding, the last one the vocabulary head. Factors are None if attention is
        the same share of all chunks' layers; else weights are without attention's squares.

        Args:
            mean_length: tokens of a typical sample, for the share of attention and for windows.
            head_factor, attention_factor: see `CostModel.from_model`.
            stage_layers: layers of each chunk; None = equally many.

        Raises:
            ConfigError: the layers do not divide into chunks, or `stage_layers` does not fit.
        """
        split = stage_layers_of(self.num_layers, layout, stage_layers)
        linear, squares = [], []
        for first, count in zip(split.offsets, split.num_layers, strict=True):
            layers = self.layer_kinds(
                first, count, mean_length=mean_length, attention_factor=attention_factor
            )
            kinds = list(layers)
            linear.append(sum(kind.layer_flops_per_token() * n for kind, n in kinds))
            squares.append(sum(kind.layer_flops_per_token_sq() * n for kind, n in kinds))
        linear[0] += self.embedding_flops_per_token()
        linear[-1] += head_factor * self.head_flops_per_token()
        # Equal shares may differ by the rounding of `attention_factor`.
        total = sum(squares)
        chunks = zip(squares, split.num_layers, strict=True)
        if all(math.isclose(own * split.total, total * layers) for own, layers in chunks):
            pairs = zip(linear, squares, strict=True)
            return _over_mean([a + b * mean_length for a, b in pairs]), None
        weights = _over_mean(linear)
        pairs = zip(_over_mean(squares), weights, strict=True)
        return weights, tuple(square / weight for square, weight in pairs)

    def balanced_stage_layers(self, layout: Layout, mean_length: float) -> StageLayers:
        """The split whose costliest chunk costs the least, with the embedding and the head.

        Args:
            mean_length: tokens of a typical sample, for the share of attention and for windows.

        Raises:
            ConfigError: fewer layers than chunks.
        """
        costs = [
            kind.layer_cost(mean_length)
            for layer in range(self.num_layers)
            for kind, _ in self.layer_kinds(layer, 1, mean_length=mean_length)
        ]
        return StageLayers.balanced(
            costs,
            pp=layout.pp,
            vpp=layout.vpp,
            embedding=self.embedding_flops_per_token(),
            head=self.head_flops_per_token(),
        )


def _over_mean(costs: Sequence[float]) -> tuple[float, ...]:
    mean = sum(costs) / len(costs)
    return tuple(cost / mean for cost in costs)


def _keys_met(window: int | None, length: float | None) -> int | None:
    """The keys of a window that a token of samples of this length meets on average."""
    if window is None or length is None:
        return window
    return None if window >= length else round(window - window * (window - 1) / (2 * length))


def typical_length(lengths: Ints) -> float:
    """Mean over tokens of their sample's length; 250 for samples of 100 and 300 tokens."""
    return float((lengths**2).sum() / lengths.sum())
