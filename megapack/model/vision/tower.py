"""A model's tower for images: transformers' module, replicated on every rank.

transformers' towers take the patches of several images at once and attend within each image; they
are exact so. Here they get attention in one call for all images, a patch embedding without a
convolution, and rotary frequencies that stay fp32 in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from megapack.cost.tower import CALL_PATCHES
from megapack.images import ImageRef
from megapack.model.attention.varlen import varlen_kernel
from megapack.model.vision.mrope import Mrope

# transformers hands the bounds of images to what it takes for flash attention, by the name.
_ATTENTION = "flash_attention_megapack"


class VisionTower(MegatronModule):  # type: ignore[misc]
    """A tower with what the decoder must know of it. Every rank has all of it.

        tower = VisionTower(model.visual, mrope=Mrope((24, 20, 20), is_interleaved=True))
        adapter = ScheduleAdapter(chunks, layout=layout, vision=tower)

    Gradients are sums over all ranks. Wrapped in Megatron's DDP with `pg_collection=tower.groups`,
    they are in `param.main_grad`; otherwise in `param.grad`.

    Args:
        visual: of transformers: Qwen3-VL's, Qwen2.5-VL's or Qwen3.5's. It is changed in place.
        mrope: the rotary embedding of the decoder.
        recompute: keep the input of each block only, and run it again in the backward. An image of
            more than `call_patches` is encoded so in any case.

    Attributes:
        groups: process groups for Megatron's DDP and optimizer: data parallel over all ranks.
        num_levels: tensors of features per image: 1, and those of DeepStack.
        patch_numbers: numbers of a patch.
        call_patches: patches of one call, at most, but for an image that is larger by itself.
    """

    def __init__(self, visual: Any, *, mrope: Mrope, recompute: bool = False) -> None:
        # Without pipeline and tensor parallelism, which the decoder's config may have.
        dtype = next(visual.parameters()).dtype
        super().__init__(
            TransformerConfig(
                num_layers=1,
                hidden_size=1,
                num_attention_heads=1,
                calculate_per_token_loss=True,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
            )
        )
        self.visual: Any = visual
        self.mrope = mrope
        self.groups = _groups_of_all_ranks()
        self.call_patches = CALL_PATCHES[recompute]
        self._recomputes = recompute
        self.num_levels = 1 + len(getattr(visual, "deepstack_merger_list", ()))
        self.merge = int(visual.config.spatial_merge_size)
        # Asked for by threads, which must run no torch operation on a parameter: it takes the
        # parameter's lock under Python's, and a forward takes them the other way round.
        self.patch_numbers = int(visual.patch_embed.proj.weight[0].numel())
        _use_one_call(visual)

    @property
    def is_trained(self) -> bool:
        """Whether a parameter is trained."""
        return any(param.requires_grad for param in self.parameters())

    @property
    def width(self) -> int:
        """Channels of a feature."""
        return int(self.visual.config.out_hidden_size)

    def calls(self, images: Mapping[int, ImageRef]) -> list[list[int]]:
        """Images by number, in calls of bounded size, in order."""
        found: list[list[int]] = []
        held = 0
        for number, ref in images.items():
            if not found or held + ref.patches > self.call_patches:
                found.append([])
                held = 0
            found[-1].append(number)
            held += ref.patches
        return found

    def encode(self, refs: Sequence[ImageRef], pixels: Sequence[Tensor]) -> Sequence[Tensor]:
        """The features of images, in one call.

        Args:
            pixels: of each image [patches, numbers of a patch].

        Returns:
            Of each image [levels, tokens, H].
        """
        # An image that is too large for a call is one of its own, and keeps no activations.
        is_large = sum(ref.patches for ref in refs) > self.call_patches
        self._keep_inputs_only(self._recomputes or is_large)
        levels = self(torch.cat([*pixels]), torch.tensor([ref.grid for ref in refs]))
        return torch.split(levels, [ref.tokens for ref in refs], dim=1)

    def _keep_inputs_only(self, recompute: bool) -> None:
        if recompute:
            self.visual.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.visual.gradient_checkpointing_disable()

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """[patches of all images, numbers] and int64 [images, 3] -> [levels, tokens, H]."""
        weight = self.visual.patch_embed.proj.weight
        patches = patches.to(weight.device, weight.dtype)
        seen = self.visual(patches, grid_thw=grids.to(weight.device))
        return torch.stack([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's description of the parameters for checkpoints: a replica on every rank."""
        return make_sharded_tensors_for_checkpoint(  # type: ignore[no-any-return]
            self.state_dict(keep_vars=True),
            prefix,
            tp_group=self.groups.tp,
            dp_cp_group=self.groups.dp_cp,
        )


def in_dtype(visual: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A tower with parameters of this type; buffers stay as they are.

    `visual.to(torch.bfloat16)` would round the rotary frequencies: at 64 patches by 0.1 radians.
    """
    for param in visual.parameters():
        param.data = param.data.to(dtype)
    return visual


def _groups_of_all_ranks() -> ProcessGroupCollection:
    """Groups by which Megatron's DDP and optimizer see all ranks as data-parallel ones.

    With the decoder's groups the optimizer would count the tower once per pipeline stage, and
    checkpoints would take ranks for replicas of others.
    """
    groups = ProcessGroupCollection()
    if not dist.is_initialized():
        return groups
    alone = _group_of_this_rank(dist.group.WORLD)
    of_one = "tp pp cp ep mp expt_dp intra_expt_dp expt_tp tp_ep tp_ep_pp"
    for name in of_one.split():
        setattr(groups, name, alone)
    for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
        setattr(groups, name, dist.group.WORLD)
    return groups


@functools.cache
def _group_of_this_rank(world: Any) -> Any:
    """One group for all towers of a process: of a job's critic, too."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _use_one_call(visual: Any) -> None:
    """Let a tower attend in one call for all images, and embed patches by one product."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    visual.config._attn_implementation = _ATTENTION
    embed = visual.patch_embed

    # The convolution's kernel is as large as its step. cuDNN before 9.16 is slow with it.
    def project(patches: Tensor) -> Tensor:
        weight = embed.proj.weight.flatten(1)
        return linear(patches.view(-1, weight.shape[1]), weight, embed.proj.bias)

    embed.forward = project


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention within each image, or each window of one, in both directions.

    Args:
        query, key, value: [1, heads, patches, d].
        cu_seq_lens_q: where each image or window begins; the last is the number of patches.

    Returns:
        [1, patches, heads, d].
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        ends = cu_seq_lens_q.to(torch.int32)
        most = int(max_length_q)
        out = varlen_kernel()(q, k, v, ends, ends, most, most, scale=scaling)
        return out[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(torch.split(one, lengths, dim=2) for one in (query, key, value)), strict=True)
    outs = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(outs, dim=2).transpose(1, 2), None
