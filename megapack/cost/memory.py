"""Bytes that training needs on one GPU, from a model's sizes and a layout.

Counted: parameters, gradients, optimizer state, activations in flight, the vocabulary head. Not
counted: the CUDA context, NCCL's buffers, workspaces, the allocator's fragmentation and gradients
of activations. Leave a tenth of the GPU or more for these.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapack.base.choices import Dtype, Recompute
from megapack.cost.sizes import ModelSizes, stage_layers_of
from megapack.cost.stages import StageLayers
from megapack.layout import Layout

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes on one GPU of one pipeline stage."""

    stage: int
    """The pipeline stage, 0 to pp - 1."""
    parameters: int
    """Weights in the dtype of the forward."""
    gradients: int
    """Gradients in fp32."""
    optimizer: int
    """Adam's moments, and fp32 main weights of a bf16 model."""
    activations: int
    """Activations kept between forwards and their backwards. With full recomputation: the layers'
    inputs, and all activations of one layer."""
    head: int
    """Logits of a chunk of tokens and the output weight's gradient; the last stage only."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.head)
        return sum(parts)

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "activations", "head")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.1f}" for name in names)
        return f"{self.total / GIB:.1f} GiB on stage {self.stage}: {parts}"


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The settings of a training job that decide its memory."""

    sizes: ModelSizes
    """Sizes of the whole model."""
    untied_embeddings: bool = True
    """Whether the output matrix is separate from the embedding. If tied, the first and the last
    stage hold a copy each."""
    dtype: Dtype = "bf16"
    """Type of weights and activations. bf16 adds fp32 main weights; gradients are fp32 in both."""
    distributed_optimizer: bool = True
    """Whether the optimizer state is split over the data-parallel ranks (with CP)."""
    recompute: Recompute = "none"
    """Activations that the backward recomputes. Attention over packed rows keeps no score matrix,
    so "selective" (attention only) saves nothing over "none" here."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits are in memory at once."""
    stage_layers: StageLayers | None = None
    """Layers of each chunk; None = equally many."""

    def stage(
        self, layout: Layout, stage: int, *, live_tokens: float, row_tokens: float
    ) -> GpuMemory:
        """Bytes on one GPU of a pipeline stage.

        With Adam, a bf16 parameter takes 2 bytes, its fp32 gradient 4, its main weight and moments
        12. The sum is 18, or 6 + 12 / dp with the distributed optimizer, as in Megatron-Core's
        documentation of it.

        Args:
            stage: 0 to pp - 1.
            live_tokens: row tokens in flight per GPU on stage 0, `Simulation.peak_live_tokens`;
                later stages hold a share of it, by their chunks in flight.
            row_tokens: tokens of the longest row per GPU, after CP.
        """
        dense, experts = self._parameters(layout, stage)
        weight, optimizer = (2, 12) if self.dtype == "bf16" else (4, 8)
        split = layout.dp * layout.cp if self.distributed_optimizer else 1
        expert_split = _expert_ranks(layout) if self.distributed_optimizer else 1
        share = layout.chunks_in_flight(stage) / layout.chunks_in_flight()
        last = stage == layout.pp - 1
        return GpuMemory(
            stage=stage,
            parameters=weight * (dense + experts),
            gradients=4 * (dense + experts),
            optimizer=optimizer * dense // split + optimizer * experts // expert_split,
            activations=self._activations(layout, stage, live_tokens * share, row_tokens),
            head=self._head(layout, row_tokens) if last else 0,
        )

    def fullest_stage(self, layout: Layout, *, live_tokens: float, row_tokens: float) -> GpuMemory:
        """Bytes on one GPU of the stage that needs most; arguments as for `stage`."""
        stages = range(layout.pp)
        return max(
            (
                self.stage(layout, stage, live_tokens=live_tokens, row_tokens=row_tokens)
                for stage in stages
            ),
            key=lambda memory: memory.total,
        )

    def activation_bytes_per_token(self, layout: Layout) -> float:
        """One layer's activations per row token of a GPU, without recomputation.

        The terms are those of Korthikanti et al. 2022 (arXiv:2205.05198), section 4, generalised to
        any head and MLP widths, without dropout masks and score matrices. TP does not split the
        inputs of norms, attention and MLP; sequence parallelism does. A 16-bit GPT with an MLP of
        width 4h keeps 8h + 24h / tp bytes. Theirs keeps 10h + 24h / tp, with two dropout masks of
        one byte per element. Experts keep input and output once per chosen expert, assuming even
        routing.
        """
        sizes = self.sizes
        width = self._activation_width
        queries = sizes.num_attention_heads * sizes.head_width
        keys = (sizes.num_query_groups or sizes.num_attention_heads) * sizes.head_width
        scatter = layout.tp if layout.sequence_parallel else 1
        whole = 4 * sizes.hidden_size / scatter
        attention = (2 * queries + 2 * keys) / layout.tp
        # fc1's output, which is twice as wide if gated, and fc2's input.
        mlp = (3 if sizes.gated else 2) * sizes.ffn_hidden_size
        if sizes.num_experts is None:
            return width * (whole + attention + mlp / layout.tp)
        shared = (3 if sizes.gated else 2) * sizes.shared_expert_ffn_hidden_size
        routed = sizes.experts_per_token * (2 * sizes.hidden_size + mlp)
        return width * (whole + attention + (shared + routed) / layout.tp)

    @property
    def _activation_width(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    def _layers(self, layout: Layout, stage: int) -> tuple[int, ...]:
        """Layers of each chunk of a stage."""
        return stage_layers_of(self.sizes.num_layers, layout, self.stage_layers).of_stage(stage)

    def _activations(
        self, layout: Layout, stage: int, live_tokens: float, row_tokens: float
    ) -> int:
        # A live token counts 1/vpp per chunk. Which chunks wait for their backwards changes during
        # a step, so all are counted like the fullest: of 2 and 3 layers, as 6 layers.
        layers = layout.vpp * max(self._layers(layout, stage))
        per_token = self.activation_bytes_per_token(layout)
        if self.recompute != "full":
            return int(live_tokens * layers * per_token)
        if not layers:
            return 0
        # Each layer keeps its input; the layer in its backward has all its activations again.
        scatter = layout.tp if layout.sequence_parallel else 1
        kept = self._activation_width * self.sizes.hidden_size / scatter
        return int(live_tokens * layers * kept + row_tokens * per_token)

    def _parameters(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Numbers of weights on one GPU: all but the experts', and the experts'."""
        sizes = self.sizes
        layer = sizes.layer_parameters()
        layers = sum(self._layers(layout, stage))
        vocabulary = sizes.vocab_size * sizes.hidden_size // layout.tp
        first = stage == 0
        last = stage == layout.pp - 1
        matrices = int(first) + int(last)
        if first and last and not self.untied_embeddings:
            matrices = 1
        dense = layers * (layer.split // layout.tp + layer.whole) + matrices * vocabulary
        dense += sizes.hidden_size if last else 0  # the final norm
        experts = layers * layer.experts // (layout.ep * _expert_tp(layout))
        return dense, experts

    def _head(self, layout: Layout, row_tokens: float) -> int:
        """Peak bytes of the backward of chunked log-probs, the larger of two phases.

        Per vocabulary column, in a chunk of C tokens with hidden size H:

        1. 10C for the chunk's bf16 logits (2), their fp32 copy (4) and the entropy term (4), and 4H
           for the fp32 accumulator of the output weight's gradient.
        2. 2C for the bf16 gradient of the logits, and 10H for that accumulator (4) and the chunk's
           contribution to it, in bf16 (2) and widened to fp32 (4).
        """
        chunk = min(self.logprob_chunk_tokens, row_tokens)
        columns = self.sizes.vocab_size / layout.tp
        hidden = self.sizes.hidden_size
        return int(columns * max(4 * hidden + 10 * chunk, 10 * hidden + 2 * chunk))


def _expert_tp(layout: Layout) -> int:
    """TP ranks that share an expert: all of them, or 1 if EP spans TP."""
    return layout.tp if (layout.dp * layout.cp) % layout.ep == 0 else 1


def _expert_ranks(layout: Layout) -> int:
    """Ranks that hold the same expert weights and split their optimizer state."""
    return max(1, layout.dp * layout.cp * layout.tp // (layout.ep * _expert_tp(layout)))
