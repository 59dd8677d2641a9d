"""Initial weights that do not depend on the layout, and frozen parameters.

Megatron draws each stage's weights from the rank's random state, so the initial model changes with
pp, tp and vpp. Here a parameter's values depend only on the seed and its name in the whole model,
and each rank keeps its slice.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError, of_all_ranks
from megapack.model.head import unwrapped
from megapack.model.parameters import GROUPED_EXPERT, global_parameters, is_expert
from megapack.model.vision.tower import VisionTower

_OUTPUT_PROJECTIONS = (
    *("linear_proj.weight", "linear_fc2.weight", "out_proj.weight", "fc2_latent_proj.weight"),
)
# Norms whose weights are around 1 whatever the other ones are.
_INNER_NORMS = ("out_norm.weight", "mixer.norm.weight")


def initialize_by_name(
    chunks: Sequence[Any],
    *,
    seed: int,
    std: float,
    num_layers: float,
    tp_group: Any,
    expert_tp_group: Any = None,
    zero_centered_norms: bool = False,
) -> None:
    """Fill every parameter of the chunks in place.

    Matrices are normal with standard deviation `std`; projections into the residual stream have
    std / sqrt(2 * num_layers), as in GPT-2. Norms multiply by 1, and biases are 0. Parameters of
    recurrent layers are drawn from the same ranges as Megatron's.

    Args:
        chunks: this rank's GPT models, not yet wrapped in DDP.
        seed: the same on all ranks.
        num_layers: layers of the whole model. One of a hybrid model, which is attention, a
            recurrent layer or an MLP alone, counts as half a layer.
        tp_group: the tensor-parallel group, which decides this rank's slices.
        expert_tp_group: the ranks that split each expert; None = tp_group.
    """
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            constant = _constant(name, zero_centered_norms) if param.dim() == 1 else None
            if constant is not None:
                param.data.fill_(constant)
                continue
            scale = 1 / math.sqrt(2 * num_layers) if name.endswith(_OUTPUT_PROJECTIONS) else 1.0
            group = expert_tp_group if expert_tp_group and is_expert(name) else tp_group
            shape = full_shape(param, group.size())
            whole = _drawn(name, shape, std * scale, _generator(name, seed))
            param.data.copy_(local_slice(whole, param, group.rank(), group.size()))


def _constant(name: str, zero_centered_norms: bool) -> float | None:
    """What a vector is filled with; None if it is drawn."""
    if name.endswith(("A_log", "mixer.dt_bias", "softmax_offset")):
        return None
    if name.endswith(("dt_bias", ".D")):
        return 1.0
    has_zeros = zero_centered_norms and not name.endswith(_INNER_NORMS)
    return 0.0 if name.endswith("bias") or has_zeros else 1.0


def _drawn(name: str, shape: Sequence[int], std: float, generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return (1 + 15 * torch.rand(shape, generator=generator)).log()
    if name.endswith("dt_bias"):
        # The softplus gives steps of 0.001 to 0.1.
        return (1e-3 * 100 ** torch.rand(shape, generator=generator)).expm1().log()
    if ".conv1d." in name:
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[-1])
    return torch.randn(shape, generator=generator) * std


def full_shape(param: Tensor, tp: int) -> tuple[int, ...]:
    """The parameter's shape without tensor parallelism."""
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= tp  # type: ignore[attr-defined]
    return tuple(shape)


def local_slice(whole: Tensor, param: Tensor, tp_rank: int, tp: int) -> Tensor:
    """This rank's part of a whole parameter (or gradient).

    A stride above 1 means that several matrices are stored as one (gate and up projection: 2). A
    rank then holds a piece of each. So it does of matrices of several sizes, which a rank's
    `partition_sizes` say.
    """
    if not getattr(param, "tensor_model_parallel", False) or tp == 1:
        return whole
    dim = param.partition_dim  # type: ignore[attr-defined]
    own_sizes = getattr(param, "partition_sizes", None)
    if own_sizes:
        parts = whole.split([size * tp for size in own_sizes], dim=dim)
        return torch.cat([part.chunk(tp, dim=dim)[tp_rank] for part in parts], dim=dim)
    stride = getattr(param, "partition_stride", 1)
    pieces = whole.chunk(stride * tp, dim=dim)
    return torch.cat(pieces[tp_rank::tp], dim=dim)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def freeze(chunks: Sequence[Any], patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name in the whole model matches a glob.

    Collective over all ranks, because a pattern may match nothing on one stage but must match
    something in the whole model.

    Args:
        chunks: this rank's GPT models, or its tower, not yet wrapped in DDP.
        patterns: globs of names as `global_parameters` gives them, such as `decoder.layers.0.*` for
            the first layer and `embedding.*` for the embedding, which includes a tied output
            projection; of a tower, such as `visual.blocks.*`.

    Raises:
        ConfigError: on every rank, if a pattern matches nothing, only some of the experts that a
            rank runs grouped, or a linear layer's weight without its bias.
    """
    # The last numbers count groups of experts, and linear layers, that are frozen in part.
    num_matches = torch.zeros(len(patterns) + 2, device=torch.cuda.current_device())
    for chunk in chunks:
        is_tower = isinstance(chunk, VisionTower)
        for name, param in chunk.named_parameters() if is_tower else global_parameters(chunk):
            matches = [fnmatch.fnmatchcase(name, pattern) for pattern in patterns]
            num_matches[:-2] += torch.tensor(matches, device=num_matches.device)
            if any(matches):
                param.requires_grad_(False)
        num_matches[-2] += _num_mixed_groups(chunk)
        num_matches[-1] += _num_lone_biases(chunk)
    dist.all_reduce(num_matches)
    *counts, num_mixed, num_lone = num_matches.tolist()
    unmatched = [pattern for pattern, count in zip(patterns, counts, strict=True) if not count]
    error = ""
    if num_mixed:
        error = (
            "model.freeze matches only some experts of a layer, and grouped experts are trained "
            "together; freeze all of them, or set model.moe_grouped_gemm=false"
        )
    elif num_lone:
        error = (
            f"model.freeze matches the weight of {num_lone:.0f} linear layers and not the bias, "
            "which would get no gradient; freeze both, for example *.linear_qkv.*"
        )
    elif unmatched:
        error = (
            f"model.freeze: no parameter matches {unmatched[0]!r}; names are like "
            "embedding.word_embeddings.weight or decoder.layers.0.mlp.linear_fc1.weight, and of a "
            "tower like visual.merger.linear_fc1.weight"
        )
    if error:
        raise of_all_ranks(ConfigError(error))


def _num_lone_biases(chunk: Any) -> int:
    """Number of linear layers whose bias is trained beside a frozen weight.

    Megatron's and Transformer Engine's then compute no gradient of the bias either.
    """
    layers = [module for module in unwrapped(chunk).modules() if hasattr(module, "bias")]
    pairs = [(getattr(layer, "weight", None), layer.bias) for layer in layers]
    return sum(
        isinstance(bias, Tensor)
        and bias.requires_grad
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and not weight.requires_grad
        for weight, bias in pairs
    )


def _num_mixed_groups(chunk: Any) -> int:
    """Number of grouped matrix products of which some experts are frozen and others are trained.

    Transformer Engine looks only at the first expert of a group.
    """
    groups: dict[tuple[str, str], set[bool]] = {}
    for name, param in unwrapped(chunk).named_parameters():
        if match := GROUPED_EXPERT.match(name):
            groups.setdefault((match[1], match[2]), set()).add(param.requires_grad)
    return sum(len(kinds) > 1 for kinds in groups.values())
