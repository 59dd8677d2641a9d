"""Bytes that training needs on one GPU, from a model's sizes and a layout.

Counted: parameters, gradients, optimizer state, activations in flight, what pieces of samples and
split backwards hold beside these, the vocabulary head, the first three of a critic, a tower, and an
estimate of NCCL's communicators. Not counted: the CUDA context, workspaces, the allocator's
fragmentation and gradients of activations. Leave a twentieth of the GPU or more for these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from megapack.base.choices import Executor, Kernel
from megapack.cost import communicators
from megapack.cost.activations import SavedActivations
from megapack.cost.head import default_chunk_tokens
from megapack.cost.layers import LayerKind
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import StageLayers, stage_layers_of
from megapack.cost.tower import CALL_PATCHES, TowerSizes
from megapack.cost.weights import NOT_IN_MUON, matches_any
from megapack.layout import Layout, ParallelSizes

GIB = 2**30


@dataclass(frozen=True)
class Carried:
    """What the orders of a plan hold beside activations: peaks on any stage, in tokens of one GPU;
    a row in one chunk counts 1/vpp. `outlook.stats.carried` finds them."""

    tokens: float = 0.0
    """Tokens whose keys and values a stage keeps for later pieces of their sample, from the forward
    of their piece to its backward."""
    earlier_tokens: float = 0.0
    """Tokens of earlier pieces that the attention of later ones reads."""
    put_off_tokens: float = 0.0
    """Row tokens between their backward and their weight gradients."""
    states: float = 0.0
    """Pieces whose last state a stage keeps in layers G and M, from the piece's forward to its
    backward; however long a piece is, it is one."""


NOTHING_CARRIED = Carried()


class ImageLoad(NamedTuple):
    """Images of a step on the rank that has the most of each."""

    patches: int
    """That it encodes."""
    tokens: int
    """Image tokens of the different images of its rows."""
    largest: int
    """Patches of the largest image, which is encoded whole."""


NO_IMAGES = ImageLoad(0, 0, 0)


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
    """Moments, and fp32 main weights of a bf16 model."""
    activations: int
    """Activations kept between forwards and their backwards. With full recomputation: the layers'
    inputs, and all activations of one layer."""
    head: int
    """Logits of a chunk of tokens and their gradient; the last stage only."""
    communicators: int
    """NCCL's buffers, an estimate: see `megapack.cost.communicators`."""
    critic: int = 0
    """Parameters, gradients and optimizer of a critic. Its steps and the policy's take turns, so
    the larger of their activations are counted."""
    tower: int = 0
    """Parameters, gradients and optimizer of a tower for images, the critic's too; of the images
    that are given, activations of those that the rank encodes, and features of its rows."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name; a critic's and a tower's only if there is one."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}
        return {k: v for k, v in parts.items() if v or k not in ("critic", "tower")}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in self.parts.items())
        return f"{self.total / GIB:.1f} GiB on stage {self.stage}: {parts}"


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The settings of a training job that decide its memory."""

    sizes: ModelSizes
    """The whole model. Its options also say what is recomputed and what is frozen, and the dtype:
    bf16 adds fp32 main weights; gradients are fp32 in both. A critic has nothing frozen."""
    distributed_optimizer: bool = True
    """Whether the optimizer state is split over the data-parallel ranks (with CP)."""
    muon: bool = False
    """Whether matrices of layers are trained with Muon, which keeps one moment where Adam keeps
    two. Needs distributed_optimizer=False."""
    attention: Kernel = "te"
    """The attention kernel, and with "te" Transformer Engine's norms, rotary embedding and
    experts."""
    fused_swiglu: bool = True
    """Whether SwiGLU is one kernel (Megatron's bias_activation_fusion): 3 instead of 5 tensors of
    the MLP's width."""
    composite_norms: bool = False
    """Whether norms are several operations in fp32, as torch computes RMSNorm on a CPU."""
    logprob_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at once; None = `head.default_chunk_tokens`."""
    stage_layers: StageLayers | None = None
    """Layers of each chunk; None = equally many."""
    critic: bool = False
    """Whether a second model with a value head is trained too."""
    critic_sizes: ModelSizes | None = None
    """The second model's sizes; None = the same."""
    value_head: bool = False
    """Whether the trained model has a value head, of one row, instead of the output matrix."""
    executor: Executor = "megatron"
    """What runs the steps; it decides the connections between stages."""
    tower: TowerSizes | None = None
    """The tower, which every rank has whole; None: images are not trained."""
    trains_tower: bool = False

    def stage(
        self,
        layout: Layout,
        stage: int,
        *,
        live_tokens: float,
        row_tokens: float,
        gathered_tokens: float = 0.0,
        carried: Carried = NOTHING_CARRIED,
        wide_sizes: int = 0,
        images: ImageLoad = NO_IMAGES,
    ) -> GpuMemory:
        """Bytes on one GPU of a pipeline stage.

        With Adam, a bf16 parameter takes 2 bytes, its fp32 gradient 4, its main weight and moments
        12. The sum is 18, or 6 + 12 / dp with the distributed optimizer, as in Megatron-Core's
        documentation of it. With Muon a matrix takes 4 less.

        Args:
            stage: 0 to pp - 1.
            live_tokens: row tokens in flight per GPU on stage 0, `Simulation.peak_live_tokens`;
                later stages hold a share of it, by their chunks in flight.
            row_tokens: tokens of the longest row per GPU, after CP.
            gathered_tokens: tokens of other DP ranks in flight on stage 0, in rows over several of
                them, as `outlook.stats.gathered_tokens` gives them.
            carried: what orders of operations hold on any stage. In such an order each stage may
                hold as many tokens as stage 0.
            wide_sizes: numbers of DP ranks above 1 that rows lie over.
            images: of a step.
        """
        dense, experts = self._parameters(layout, stage, value_head=self.value_head)
        weights = self._weight_bytes(dense + experts)
        gradients, optimizer = self._state(layout, stage, self.value_head, self.sizes.freeze)
        critic = 0
        models = [self]
        if self.critic:
            own = self
            if self.critic_sizes is not None:
                own = replace(self, sizes=self.critic_sizes, stage_layers=None)
                models.append(own)
            parameters = own._parameters(layout, stage, value_head=True)
            critic = own._weight_bytes(sum(parameters)) + sum(own._state(layout, stage, True, ()))
        share = layout.chunks_in_flight(stage) / layout.chunks_in_flight()
        if carried != NOTHING_CARRIED:
            share = 1.0
        live, gathered = live_tokens * share, gathered_tokens * share
        kept = (
            one._activations(layout, stage, live, row_tokens, gathered)
            + one._carried(layout, stage, carried)
            for one in models
        )
        last = stage == layout.pp - 1
        return GpuMemory(
            stage=stage,
            parameters=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=max(kept),
            head=self._head(layout, row_tokens) if last and not self.value_head else 0,
            communicators=communicators.BYTES
            * communicators.num_communicators(
                layout,
                stage,
                executor=self.executor,
                wide_sizes=wide_sizes,
                distributed_optimizer=self.distributed_optimizer,
                tied_embeddings=not self.sizes.untie_embeddings,
            ),
            critic=critic,
            tower=self._tower(layout, stage, images),
        )

    def _tower(self, layout: Layout, stage: int, images: ImageLoad) -> int:
        """A stage reads the features of its own layers: the embedding's, and with DeepStack one
        more level in each of the first layers. A GPU holds all levels of what it encodes."""
        tower = self.tower
        if tower is None:
            return 0
        state: float = self._weight_bytes(tower.parameters)
        if self.trains_tower:
            split = layout.world_size if self.distributed_optimizer else 1
            state += tower.parameters * (4 + (12 if self._is_bf16 else 8) / split)
        chunks = self._chunks(layout, stage)
        ends = ((first, min(first + n, tower.num_levels - 1)) for first, n in chunks)
        num_levels = (stage == 0) + sum(len(range(*own)) for own in ends)
        held = tower.feature_bytes(images.tokens, num_levels, is_trained=self.trains_tower)
        own_tokens = images.patches // tower.merge**2
        held += tower.feature_bytes(own_tokens, tower.num_levels, is_trained=False)
        if self.trains_tower:
            recompute = self.sizes.recompute == "full"
            # What is more than one call is encoded again, call by call; a larger image by itself,
            # with recomputation.
            call = CALL_PATCHES[recompute]
            large = min(images.patches, images.largest)
            held += max(
                tower.kept_bytes(min(images.patches, call), recompute=recompute),
                tower.kept_bytes(large if large > call else 0, recompute=True),
            )
        return int(state * (2 if self.critic else 1) + held)

    def fullest_stage(self, layout: Layout, **tokens: Any) -> GpuMemory:
        """Bytes on one GPU of the stage that needs most; arguments as for `stage`."""
        stages = (self.stage(layout, stage, **tokens) for stage in range(layout.pp))
        return max(stages, key=lambda memory: memory.total)

    @property
    def _is_bf16(self) -> bool:
        return self.sizes.dtype == "bf16"

    def _weight_bytes(self, count: int) -> int:
        """Bytes of weights in the dtype of the forward."""
        return count * (2 if self._is_bf16 else 4)

    def _state(
        self, layout: Layout, stage: int, value_head: bool, frozen: tuple[str, ...]
    ) -> tuple[int, int]:
        """Bytes on one GPU of the trained weights' gradients and of their optimizer."""
        dense, experts = self._parameters(layout, stage, value_head=value_head, frozen=frozen)
        optimizer = 12 if self._is_bf16 else 8
        split = layout.dp * layout.cp if self.distributed_optimizer else 1
        expert_split = layout.expert_dp if self.distributed_optimizer else 1
        state = optimizer * dense // split + optimizer * experts // expert_split
        if self.muon:
            others = (*frozen, *NOT_IN_MUON)
            state -= 4 * sum(self._parameters(layout, stage, value_head=value_head, frozen=others))
        return 4 * (dense + experts), state

    def saved(self, layout: Layout, kind: LayerKind | None = None) -> SavedActivations:
        """What autograd keeps per row token of a GPU.

        Args:
            kind: one of `ModelSizes.layer_kinds`; None = that of the last layer.
        """
        return SavedActivations(
            kind=kind or self.sizes.last_kind,
            layout=layout,
            attention=self.attention,
            fused_swiglu=self.fused_swiglu,
            composite_norms=self.composite_norms,
        )

    def least_piece(self, layout: ParallelSizes) -> int | None:
        """Padded tokens of a piece whose activations take the bytes of the states at its end and
        of their gradients; None without layers G and M.

        Both are held from the piece's forward to its backward, so shorter pieces hold more states
        than activations. Layers are those of the whole model, whatever their stages.

        Args:
            layout: gives tp, etp and sequence parallelism.
        """
        etp = layout.etp or layout.tp
        own = Layout(tp=layout.tp, etp=etp, sequence_parallel=layout.sequence_parallel)
        kinds = [(self.saved(own, kind), n) for kind, n in self.sizes.layer_kinds()]
        states = sum(2 * n * saved.carried_state for saved, n in kinds)
        return math.ceil(states / sum(n * saved.held for saved, n in kinds)) or None

    def _activations(
        self,
        layout: Layout,
        stage: int,
        live_tokens: float,
        row_tokens: float,
        gathered_tokens: float,
    ) -> int:
        """Layers in flight; embedding, final norm and head of the one row that is in them."""
        # A live token counts 1/vpp per chunk. Which chunks wait for their backwards changes during
        # a step, so all are counted like the fullest: of 2 and 3 layers, as 6 layers.
        by_chunk = [
            [(self.saved(layout, kind), n) for kind, n in kinds]
            for kinds in self._layers(layout, stage)
        ]
        num_chunks = sum(bool(kinds) for kinds in by_chunk)
        full = self.sizes.recompute == "full"
        held = max(sum(n * saved.held for saved, n in kinds) for kinds in by_chunk)
        kept = live_tokens * layout.vpp * held
        gathered = [sum(n * saved.gathered_token for saved, n in kinds) for kinds in by_chunk]
        one_layer = (saved.gathered_token for kinds in by_chunk for saved, _ in kinds)
        most = max(one_layer, default=0.0) if full else layout.vpp * max(gathered)
        kept += gathered_tokens * most
        # One layer is in its backward, and has again what it did not keep.
        again = (saved.recomputed_layer for kinds in by_chunk for saved, _ in kinds)
        kept += row_tokens * max(again, default=0.0)
        saved = self.saved(layout)
        kept += live_tokens * num_chunks * saved.rotary_table
        if layout.vpp > 1:
            # Megatron keeps the outputs that it sent. With vpp=1 it could free them.
            kept += live_tokens * layout.vpp * saved.layer_input
        if stage == 0:
            kept += live_tokens * saved.embedding
        if stage == layout.pp - 1:
            kept += row_tokens * saved.final_norm_and_head
        return int(kept)

    def _carried(self, layout: Layout, stage: int, carried: Carried) -> int:
        """Carried keys, values and states with their gradients, and what waits for weight
        gradients.

        Attention over earlier tokens keeps a copy of their keys and values, unless the layer is
        recomputed: then only the layer in its backward has one. Rows between their backward and
        their weight gradients are counted as live with what their forward kept; here comes what was
        recomputed. Gradients of outputs take about the place of what only the backward needed.
        """
        kinds = [kind for chunk in self._layers(layout, stage) for kind in chunk]
        full = self.sizes.recompute == "full"
        # A chunk counts 1/vpp in the peaks, and a layer 1 over the layers of its chunk.
        keys = carried.tokens * 2 + (0.0 if full else carried.earlier_tokens)
        total = 0.0
        for kind, count in kinds:
            saved = self.saved(layout, kind)
            total += count * keys * saved.carried_token
            total += count * 2 * carried.states * saved.carried_state
            total += count * carried.put_off_tokens * saved.recomputed_layer
        if full:
            one_layer = (self.saved(layout, kind).carried_token for kind, _ in kinds)
            total += carried.earlier_tokens * layout.vpp * max(one_layer, default=0.0)
        return int(total)

    def _layers(self, layout: Layout, stage: int) -> list[list[tuple[LayerKind, int]]]:
        """The kinds of layers of each chunk of a stage, each with its number."""
        chunks = self._chunks(layout, stage)
        return [list(self.sizes.layer_kinds(first, count)) for first, count in chunks]

    def _chunks(self, layout: Layout, stage: int) -> list[tuple[int, int]]:
        """The first layer of each chunk of a stage, and how many it has."""
        split = stage_layers_of(self.sizes.num_layers, layout, self.stage_layers)
        return list(zip(split.offsets, split.num_layers, strict=True))[stage :: split.pp]

    def _parameters(
        self, layout: Layout, stage: int, *, value_head: bool = False, frozen: Sequence[str] = ()
    ) -> tuple[int, int]:
        """Numbers of weights on one GPU: all but the experts', and the experts'.

        Args:
            value_head: the last stage has a value head instead of the vocabulary's output matrix.
            frozen: globs of names whose weights are not counted.
        """
        sizes = self.sizes
        runs = self._chunks(layout, stage)
        if frozen:
            # Globs may name single layers.
            runs = [(layer, 1) for first, n in runs for layer in range(first, first + n)]
        layers = [
            (kind.layer_parameters(first, frozen), n)
            for first, length in runs
            for kind, n in sizes.layer_kinds(first, length)
        ]
        vocabulary = sizes.num_ids * sizes.hidden_size // layout.tp
        output = sizes.hidden_size if value_head else vocabulary
        others = {"embedding.word_embeddings.weight": vocabulary} if stage == 0 else {}
        if stage == layout.pp - 1:
            is_tied = not value_head and not self.sizes.untie_embeddings
            name = "embedding.word_embeddings.weight" if is_tied else "output_layer.weight"
            others |= {name: output, "decoder.final_layernorm.weight": sizes.hidden_size}
        dense = sum(n * (layer.split // layout.tp + layer.whole) for layer, n in layers)
        dense += sum(count for name, count in others.items() if not matches_any(name, frozen))
        experts = sum(n * layer.experts for layer, n in layers) // (layout.ep * layout.etp)
        return dense, experts

    def _head(self, layout: Layout, row_tokens: float) -> int:
        """Peak bytes of the backward of chunked log-probs, the larger of two phases.

        Weight gradients are added to DDP's gradients. Per vocabulary column, with chunks of C
        tokens and hidden size H:

        1. 4C for the chunk's fp32 logits, and in a bf16 model 2C for their bf16 gradient.
        2. After the last chunk, a matrix of the weight's shape and type that autograd asks for: 2H
           in a bf16 model, else 4H.
        """
        sizes = self.sizes
        chunk = self.logprob_chunk_tokens or default_chunk_tokens(sizes.num_ids, layout.tp)
        chunk_tokens = min(chunk, row_tokens)
        columns = sizes.num_ids / layout.tp
        logits = (6 if self._is_bf16 else 4) * chunk_tokens
        return int(columns * max(logits, self._weight_bytes(sizes.hidden_size)))
