"""Bytes that training takes on one GPU, from a model's sizes and a layout.

Counted: parameters, gradients, optimizer, activations in flight, the vocabulary head. Not counted:
the CUDA context, NCCL's buffers, workspaces, the allocator's fragmentation and gradients of
activations; leave a tenth of the GPU or more to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapack.base.choices import Dtype, Recompute
from megapack.cost.sizes import ModelSizes
from megapack.layout import Layout

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes on one GPU of one pipeline stage."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept between forwards and their backwards, and one layer that is computed again."""
    head: int
    """Logits of a chunk and the output weight's gradient; the last stage only."""

    @property
    def total(self) -> int:
        """All of it."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.head)
        return sum(parts)

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "activations", "head")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.1f}" for name in names)
        return f"{self.total / GIB:.1f} GiB on stage {self.stage}: {parts}"


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What of a training setup decides its memory."""

    sizes: ModelSizes
    untied_embeddings: bool = True
    """An output matrix of its own; tied, the first and the last stage hold a copy each."""
    dtype: Dtype = "bf16"
    """Of weights and activations. bf16 adds fp32 main weights; gradients are fp32 in both."""
    distributed_optimizer: bool = True
    """Optimizer state is split over data-parallel ranks (with CP)."""
    recompute: Recompute = "none"
    """Activations computed again. Attention over packed rows keeps no score matrix, so "selective"
    (attention only) saves nothing over "none" here."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""

    def stage(
        self, layout: Layout, stage: int, *, live_tokens: float, row_tokens: float
    ) -> GpuMemory:
        """One GPU of a pipeline stage.

        With Adam a bf16 parameter takes 2 bytes, its fp32 gradient 4, main weight and moments 12:
        18, or 6 + 12 / dp under the distributed optimizer, as Megatron-Core's page on it counts.

        Args:
            stage: 0 to pp - 1.
            live_tokens: row tokens in flight per GPU on stage 0, `Simulation.peak_live_tokens`;
                other stages hold their share of it.
            row_tokens: the longest row per GPU, after CP.
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
            activations=self._activations(layout, live_tokens * share, row_tokens),
            head=self._head(layout, row_tokens) if last else 0,
        )

    def fullest_stage(self, layout: Layout, *, live_tokens: float, row_tokens: float) -> GpuMemory:
        """The stage that takes most; see `stage`."""
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

        After Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with their terms for any head
        and MLP widths, without dropout masks and without score matrices. What TP does not split,
        the inputs of norms, attention and MLP, is split by sequence parallelism. 16-bit GPT with
        an MLP of 4h: 8h + 24h / tp; theirs has 10h + 24h / tp, as two masks are one byte each.
        Experts keep their inputs and outputs once per chosen expert, evenly routed.
        """
        sizes, width = self.sizes, self._activation_width
        queries = sizes.num_attention_heads * sizes.head_width
        keys = (sizes.num_query_groups or sizes.num_attention_heads) * sizes.head_width
        scatter = layout.tp if layout.sequence_parallel else 1
        whole = 4 * sizes.hidden_size / scatter
        attention = (2 * queries + 2 * keys) / layout.tp
        # fc1's output, twice as wide where it is gated, and fc2's input.
        mlp = (3 if sizes.gated else 2) * sizes.ffn_hidden_size
        if sizes.num_experts is None:
            return width * (whole + attention + mlp / layout.tp)
        shared = (3 if sizes.gated else 2) * sizes.shared_expert_ffn_hidden_size
        routed = sizes.experts_per_token * (2 * sizes.hidden_size + mlp)
        return width * (whole + attention + (shared + routed) / layout.tp)

    @property
    def _activation_width(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    def _activations(self, layout: Layout, live_tokens: float, row_tokens: float) -> int:
        layers = self.sizes.num_layers / layout.pp
        per_token = self.activation_bytes_per_token(layout)
        if self.recompute != "full":
            return int(live_tokens * layers * per_token)
        # Each layer keeps its input; the one that goes backward is whole.
        scatter = layout.tp if layout.sequence_parallel else 1
        kept = self._activation_width * self.sizes.hidden_size / scatter
        return int(live_tokens * layers * kept + row_tokens * per_token)

    def _parameters(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Weights of a GPU: those of experts, and all others."""
        sizes, layer = self.sizes, self.sizes.layer_parameters()
        layers = sizes.num_layers // layout.pp
        vocabulary = sizes.vocab_size * sizes.hidden_size // layout.tp
        first, last = stage == 0, stage == layout.pp - 1
        matrices = int(first) + int(last)
        if first and last and not self.untied_embeddings:
            matrices = 1
        dense = layers * (layer.split // layout.tp + layer.whole) + matrices * vocabulary
        dense += sizes.hidden_size if last else 0
        experts = layers * layer.experts // (layout.ep * _expert_tp(layout))
        return dense, experts

    def _head(self, layout: Layout, row_tokens: float) -> int:
        """The backward of chunked log-probs: a chunk's fp32 logits, made of 16-bit ones, with the
        entropy's; then their 16-bit gradient beside the output weight's, which adds up in fp32
        while a chunk's is made and widened."""
        chunk = min(self.logprob_chunk_tokens, row_tokens)
        columns = self.sizes.vocab_size / layout.tp
        hidden = self.sizes.hidden_size
        return int(columns * max(4 * hidden + 10 * chunk, 10 * hidden + 2 * chunk))


def _expert_tp(layout: Layout) -> int:
    """Experts are split over TP like everything else, unless EP spans TP."""
    return layout.tp if (layout.dp * layout.cp) % layout.ep == 0 else 1


def _expert_ranks(layout: Layout) -> int:
    """Ranks that hold the same experts."""
    return max(1, layout.dp * layout.cp * layout.tp // (layout.ep * _expert_tp(layout)))
