"""Images ahead of the schedule: each image of a step is encoded once, on one of all ranks.

    refs, pixels -> prepare (owners) -> encode -> exchange -> FeatureTable -> (the rows' forwards
    and backwards) -> exchange back -> the tower's backward -> sum over all ranks

A tower in the first stage gives that stage more to do than the others, which no packing cures; and
a prompt's image would be encoded in every row that has one of its samples. Here the work is spread
over all ranks, pipeline stages too. A rank gets the features of its own rows, of the levels that
its layers add. All sizes follow from the plan, so no sizes are sent.

Features of a frozen tower are kept for the passes of a batch: old log-probs, reference and steps;
but not if its weights change, as of a reference with another tower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError, DataError, MegapackError, first_line
from megapack.images import ImageRef
from megapack.layout import Layout
from megapack.model.head import unwrapped
from megapack.model.overlap import overlaps_gather
from megapack.model.vision.decoder import levels_of, read_images
from megapack.model.vision.features import FeatureTable, RowFeatures, RowImages
from megapack.model.vision.tower import VisionTower
from megapack.plan.images import used_images
from megapack.plan.plan import StepPlan
from megapack.ranks.agree import agree
from megapack.ranks.threads import DaemonThread
from megapack.rows.packed import PackedRow
from megapack.rows.transfer import moved
from megapack.samples import SampleBatch
from megapack.schedule.between_steps import sampled
from megapack.schedule.checks import gradient_buffers, reduces
from megapack.schedule.listeners import Listeners

# Threads that decode and resize, at most. Chosen by hand.
_MOST_THREADS = 8


class _Rank(NamedTuple):
    """What the others must know of a rank."""

    dp_rank: int
    levels: tuple[int, ...]
    """Levels of features that its layers read."""
    gives_back: bool
    """Whether its gradients count: without sequence parallelism all tensor-parallel ranks have the
    same."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepImages:
    """The images of one pass, the same on every rank but for pixels."""

    refs: list[ImageRef]
    """Different images, as `StepPlan.images` has them."""
    owners: list[int]
    """The rank that encodes each."""
    needs: list[list[int]]
    """Per data-parallel rank the images of its rows, in the order of its table."""
    batch_keys: set[str]
    """Keys of the whole batch's images."""
    pixels: dict[int, Tensor]
    """Of images that this rank encodes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Features of one pass on this rank."""

    images: StepImages
    table: FeatureTable
    starts: dict[str, int]
    """By key: the image's first feature in the table."""
    own: dict[int, Tensor]
    """By image that this rank encodes: [levels, tokens, H]; with the tower's graph, unless there
    are waves."""
    waves: list[dict[int, Tensor]]
    """By image the pixels of each call that the backward makes again, as the graphs of all calls
    would not fit; none where the rank's images are one call."""


class Ahead:
    """Encodes images before a pass, and runs the tower's backward after it. One per adapter; the
    constructor is a collective of all ranks.

    Args:
        tower: in Megatron's DDP, or not.
        chunks: the decoder's, of this rank.
        groups: Megatron's process groups.
        device: of features.

    Attributes:
        encoded_patches: of each image that this rank has encoded in the last pass.

    Raises:
        ConfigError: the decoder cannot read features.
    """

    def __init__(
        self,
        tower: Any,
        chunks: Sequence[Any],
        layout: Layout,
        groups: Any,
        device: torch.device,
    ) -> None:
        # Stages differ in their layers: if one refuses its own, all raise.
        module = agree(lambda: _checked_tower(tower, chunks), device=device)
        self.tower = tower
        self._module = module
        self._layout = layout
        self._device = device
        self._rank = dist.get_rank()
        self._tp_rank = int(groups.tp.rank())
        own = _Rank(
            int(groups.dp.rank()),
            tuple(levels_of(chunks, module.num_levels)),
            layout.sequence_parallel or self._tp_rank == 0,
        )
        self._ranks: list[_Rank] = [own] * dist.get_world_size()
        dist.all_gather_object(self._ranks, own)
        self._own = own
        # The rank of each GPU as plans count them.
        self._rank_of_gpu = sorted(range(len(self._ranks)), key=lambda r: self._ranks[r].dp_rank)
        # Daemons: pixels on a file system that is lost must not keep the process.
        self._threads = DaemonThread("megapack-image", min(_MOST_THREADS, os.cpu_count() or 1))
        weakref.finalize(self, self._threads.stop, 0.0)
        # Pixels by key, and the keys of the last `prefetch`.
        self._loading: dict[str, Future[Tensor]] = {}
        self._prefetched: set[str] = set()
        # Of a frozen tower: features by key, some values of the weights that they are of, and by
        # key the rank that an earlier pass of the batch has encode an image, alike on all ranks.
        self._kept: dict[str, Tensor] = {}
        self._weights: Tensor | None = None
        self._places: dict[str, int] = {}
        self.encoded_patches: tuple[int, ...] = ()

    def prepare(self, step: StepPlan, batch: SampleBatch) -> StepImages:
        """The images of a step, and this rank's pixels; local work.

        Raises:
            DataError: an image is not the plan's or does not suit the tower, or its pixels cannot
                be made.
        """
        if self._module.is_trained and reduces([self.tower]) and not gradient_buffers(self.tower):
            raise ConfigError(
                "the tower was frozen when it was wrapped in Megatron's DDP, which reduces no "
                "gradients of it; set requires_grad before wrapping it, or freeze it again"
            )
        images = self._planned(step, batch)
        own = {i: images.refs[i] for i in self._own_images(images)}
        # All begin before the first is waited for.
        loading = [(i, self._load(ref)) for i, ref in own.items() if ref.key not in self._placed]
        for ref in own.values():
            # What fails is tried again by the next call.
            self._loading.pop(ref.key, None)
        images.pixels.update((i, future.result()) for i, future in loading)
        return images

    def agreed(self, images: StepImages) -> None:
        """Note who encodes what in a pass that all ranks have prepared; those of a pass that one
        of them could not prepare must not count."""
        kept = {key: self._placed[key] for key in self._placed.keys() & images.batch_keys}
        found = zip(images.refs, images.owners, strict=True)
        self._places = kept | {ref.key: rank for ref, rank in found}

    @property
    def _placed(self) -> dict[str, int]:
        """Features of a frozen tower stay where the batch's first pass makes them."""
        return {} if self._module.is_trained else self._places

    def _own_images(self, images: StepImages) -> list[int]:
        return [i for i, owner in enumerate(images.owners) if owner == self._rank]

    def prefetch(self, step: StepPlan, batch: SampleBatch) -> None:
        """Begin to make this rank's pixels of a pass that follows."""
        images = self._planned(step, batch)
        own = [images.refs[i] for i in self._own_images(images)]
        keys = {ref.key for ref in own}
        # The passes of the batch before may still need what was begun for them; others are over.
        for key in {*self._loading} - self._prefetched - keys:
            self._loading.pop(key, None)
        self._prefetched = keys
        for ref in own:
            if ref.key not in self._placed:
                self._load(ref)

    def _planned(self, step: StepPlan, batch: SampleBatch) -> StepImages:
        if batch.tensor_names:
            raise DataError(
                f"the batch has images and the tensor {batch.tensor_names[0]!r}; give one of them"
            )
        if any(image.owner is None for image in step.images):
            raise DataError(
                "the plan has images='row', and this adapter encodes images ahead of rows; plan "
                "with Policy(images='ahead')"
            )
        images = [batch.images(i) for i in range(len(batch))]
        # Of samples with one image the first, which errors name.
        every = {ref.key: ref for refs in reversed(images) for ref in reversed(refs)}
        used = used_images(images, step.kept_samples)
        if [image._replace(owner=None) for image in step.images] != used:
            raise DataError(
                f"the step was planned with {len(step.images)} images, its samples have "
                f"{len(used)}, or others; give build_dp_schedule the images of the batch"
            )
        refs = [every[image.key] for image in step.images]
        for ref in refs:
            if ref.merge != self._module.merge:
                raise DataError(
                    f"image {ref.key!r} has merge={ref.merge}, the tower merges "
                    f"{self._module.merge} x {self._module.merge} patches; give merge="
                    f"{self._module.merge}"
                )
        owners = [
            self._placed.get(image.key, self._rank_of_gpu[image.owner or 0])
            for image in step.images
        ]
        return StepImages(
            refs=refs,
            owners=owners,
            needs=step.rank_images,
            batch_keys={*every},
            pixels={},
        )

    def _load(self, ref: ImageRef) -> Future[Tensor]:
        found = self._loading.get(ref.key)
        if found is None:
            found = self._loading.setdefault(
                ref.key, self._threads.submit(partial(self._pixels, ref))
            )
        return found

    def _pixels(self, ref: ImageRef) -> Tensor:
        if ref.pixels is None:
            raise DataError(f"image {ref.key!r} has no pixels on the rank that encodes it")
        try:
            pixels = ref.pixels()
        except MegapackError:
            raise
        except Exception as error:  # a user's function raises what it likes
            raise DataError(
                f"image {ref.key!r}: its pixels cannot be made ({type(error).__name__}: "
                f"{first_line(error)}); correct them, or leave its samples out"
            ) from error
        shape = (ref.patches, self._module.patch_numbers)
        is_tensor = isinstance(pixels, Tensor)
        if not is_tensor or tuple(pixels.shape) != shape:
            found = f"shape {tuple(pixels.shape)}" if is_tensor else f"type {type(pixels).__name__}"
            raise DataError(
                f"image {ref.key!r} of grid {ref.grid} has pixels of {found}, the tower reads a "
                f"tensor of {shape}; make grid and pixels with the model's own processor"
            )
        return pixels

    def encode(self, images: StepImages, listeners: Listeners, *, is_training: bool) -> Encoded:
        """Encode this rank's images, and exchange features; a collective of all ranks."""
        collects = is_training and self._module.is_trained
        refs, pixels = images.refs, images.pixels
        self._keep_current()
        # What a pass was prepared to encode, which has failed, or with weights of before.
        missing = {
            i: refs[i]
            for i in self._own_images(images)
            if i not in pixels and refs[i].key not in self._kept
        }
        made = [(i, self._threads.submit(partial(self._pixels, ref))) for i, ref in missing.items()]
        pixels.update((i, future.result()) for i, future in made)
        groups = self._module.calls({i: refs[i] for i in pixels})
        calls = [{i: pixels[i] for i in group} for group in groups]
        self.encoded_patches = tuple(refs[i].patches for i in pixels)
        pixels.clear()
        waves = calls if collects and len(calls) > 1 else []
        listeners.begin("E", 0, -1)
        with torch.set_grad_enabled(collects and not waves):
            own = {i: one for call in calls for i, one in self._encoded(refs, call).items()}
        listeners.end("E", 0, -1)
        if not self._module.is_trained:
            every = self._kept | {refs[i].key: features for i, features in own.items()}
            self._kept = {key: every[key] for key in every.keys() & images.batch_keys}
            own = {i: self._kept[refs[i].key] for i in self._own_images(images)}
        table, starts = self._tables(images, own)
        return Encoded(images, FeatureTable(table, collects), starts, own, waves)

    def _encoded(self, refs: list[ImageRef], pixels: dict[int, Tensor]) -> dict[int, Tensor]:
        found = self._module.encode([refs[i] for i in pixels], [*pixels.values()])
        return dict(zip(pixels, found, strict=True))

    def _keep_current(self) -> None:
        """Forget features that are not of the tower's weights."""
        weights = None if self._module.is_trained else sampled(self._module.parameters())
        if weights is None or self._weights is None or not torch.equal(weights, self._weights):
            self._kept = {}
        self._weights = weights

    def _tables(
        self, images: StepImages, own: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], dict[str, int]]:
        """Send features to the ranks that need them, and join what arrives."""
        refs, levels, width = images.refs, self._own.levels, self._module.width
        sent = [
            [own[i].detach()[list(to.levels)].flatten(0, 1) for i in self._sent(images, rank)]
            for rank, to in enumerate(self._ranks)
        ]
        needed = images.needs[self._own.dp_rank]
        due = [[i for i in needed if images.owners[i] == rank] for rank in range(len(self._ranks))]
        like = next(self._module.parameters()).detach()
        sizes = [[refs[i].tokens * len(levels) for i in each] for each in due]
        arrived = _exchange(sent, sizes, like.new_empty(0, width))
        ends = list(itertools.accumulate((refs[i].tokens for i in needed), initial=0))
        starts = dict(zip((refs[i].key for i in needed), ends, strict=False))
        values = like.new_empty(len(levels), ends[-1], width)
        for i, features in zip(itertools.chain(*due), arrived, strict=True):
            first, count = starts[refs[i].key], refs[i].tokens
            values[:, first : first + count] = features.view(len(levels), count, width)
        return dict(zip(levels, values, strict=True)), starts

    def _sent(self, images: StepImages, reader: int) -> list[int]:
        """The images of this rank that a rank reads, in the order of that one's table."""
        needed = images.needs[self._ranks[reader].dp_rank]
        return [i for i in needed if images.owners[i] == self._rank]

    def backward(self, encoded: Encoded, listeners: Listeners) -> None:
        """Bring gradients of features back, and run the tower's backward; a collective."""
        if not encoded.table.collects:
            return
        images, width = encoded.images, self._module.width
        needed = images.needs[self._own.dp_rank] if self._own.gives_back else []
        sent = [
            [self._gradient(encoded, images.refs[i]) for i in needed if images.owners[i] == rank]
            for rank in range(len(self._ranks))
        ]
        readers = [
            (rank.levels, i)
            for number, rank in enumerate(self._ranks)
            for i in (self._sent(images, number) if rank.gives_back else ())
        ]
        sizes = [
            [images.refs[i].tokens * len(rank.levels) for i in self._sent(images, number)]
            if rank.gives_back
            else []
            for number, rank in enumerate(self._ranks)
        ]
        arrived = _exchange(sent, sizes, torch.empty(0, width, device=self._device))
        # In the order of ranks, so that sums are the same in each run.
        sums = {i: torch.zeros_like(one, dtype=torch.float32) for i, one in encoded.own.items()}
        for (levels, i), grad in zip(readers, arrived, strict=True):
            sums[i][list(levels)] += grad.view(len(levels), images.refs[i].tokens, width)
        earlier = self._without_earlier()
        listeners.begin("T", 0, -1)
        with self.tower.no_sync() if reduces([self.tower]) else contextlib.nullcontext():
            for wave in encoded.waves or [{}]:
                made = self._encoded(images.refs, wave) if wave else encoded.own
                if made:
                    grads = [sums[i].to(one.dtype) for i, one in made.items()]
                    torch.autograd.backward([*made.values()], grads)
        listeners.end("T", 0, -1)
        self._reduce(earlier)

    def _gradient(self, encoded: Encoded, ref: ImageRef) -> Tensor:
        """The gradient of an image's features on this rank, [levels * tokens, H]."""
        first = encoded.starts[ref.key]
        gradients = encoded.table.gradients
        zeros = torch.zeros(ref.tokens, self._module.width, device=self._device)
        parts = [
            gradients[level][first : first + ref.tokens] if level in gradients else zeros
            for level in self._own.levels
        ]
        return torch.cat(parts) if parts else zeros[:0]

    def _without_earlier(self) -> dict[Tensor, Tensor]:
        """Take away `param.grad` of earlier steps, which is added over the ranks already."""
        if reduces([self.tower]):
            return {}
        found = {param: param.grad for param in self._module.parameters()}
        for param in found:
            param.grad = None
        return {param: grad for param, grad in found.items() if grad is not None}

    def _reduce(self, earlier: Mapping[Tensor, Tensor]) -> None:
        """Add the tower's gradients over all ranks, and then those of earlier steps."""
        if reduces([self.tower]):
            if self.tower.ddp_config.overlap_grad_reduce:
                self.tower.start_grad_sync()
            self.tower.finish_grad_sync()
            return
        for param in self._module.parameters():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad)
                if param in earlier:
                    param.grad += earlier[param]

    def row(self, row: PackedRow, encoded: Encoded) -> RowImages | None:
        """What layers read of a row, on the device; None if no sample of it has images."""
        if row.features_T is None or row.rotary_T3 is None:
            return None
        numbers = [torch.arange(ref.tokens) + encoded.starts[ref.key] for ref in row.images]
        index_T = row.features_T
        if self._layout.sequence_parallel:
            index_T = index_T.chunk(self._layout.tp)[self._tp_rank]
        (positions_P,) = (index_T >= 0).nonzero(as_tuple=True)
        # A piece after an image reads no feature.
        index_P = torch.cat([index_T.new_zeros(0), *numbers])[index_T[positions_P]]
        places = moved((positions_P, index_P, row.rotary_T3), self._device)
        features = RowFeatures(encoded.table, *places[:2])
        return RowImages(places[2], self._module.mrope, features)


def _checked_tower(tower: Any, chunks: Sequence[Any]) -> VisionTower:
    """The tower, out of its wrapper; lets the chunks read what it encodes.

    Raises:
        ConfigError: its gradients would not be added over all ranks, or a rank would wait for
            others; or see `read_images`.
    """
    module = unwrapped(tower)
    if not isinstance(module, VisionTower):
        raise ConfigError(
            f"vision is {type(module).__name__}; give a VisionTower, in Megatron's DDP or not"
        )
    if reduces(chunks) != reduces([tower]):
        raise ConfigError(
            "of decoder and tower one is wrapped in Megatron's DDP and the other is not; wrap "
            "both, the tower with pg_collection=tower.groups"
        )
    world = dist.get_world_size()
    for buffer in gradient_buffers(tower):
        ranks, factor = buffer.data_parallel_world_size, buffer.gradient_scaling_factor
        if ranks != world or factor != 1.0:
            raise ConfigError(
                f"the tower's DDP adds gradients times {factor} over {ranks} of {world} ranks; "
                "wrap it by DistributedDataParallel(tower.config, ..., "
                "pg_collection=tower.groups)"
            )
    if overlaps_gather(tower):
        raise ConfigError(
            "the tower's DDP has overlap_param_gather, and a rank without images would never "
            "gather; wrap the tower with overlap_param_gather=False"
        )
    read_images(chunks, module.num_levels)
    for chunk in map(unwrapped, chunks):
        module.mrope.axes(chunk.rotary_pos_emb.inv_freq.numel())
    return module


def _exchange(
    sent: Sequence[Sequence[Tensor]], due: Sequence[Sequence[int]], empty: Tensor
) -> Sequence[Tensor]:
    """Send rows of channels between all ranks.

    Args:
        sent: per rank what it gets, each [rows, H].
        due: per rank the rows of each tensor that comes from it.
        empty: [0, H] of the type and device of what is sent.

    Returns:
        What arrives, in the order of ranks.
    """
    outgoing = torch.cat([empty, *itertools.chain(*sent)])
    incoming = outgoing.new_empty(sum(map(sum, due)), empty.shape[1])
    counts = [sum(len(one) for one in each) for each in sent]
    dist.all_to_all_single(incoming, outgoing, [sum(each) for each in due], counts)
    return torch.split(incoming, [*itertools.chain(*due)])
