"""Weights that do not depend on the layout, and parameters that are not trained.

Megatron draws each stage's weights from that rank's random state, so another pp, tp or vpp starts
from another model. Here a parameter's values follow from its name in the whole model and the seed
alone, and each rank keeps its slice.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.head import unwrapped

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# SequentialMLP's `local_experts.3.` and the grouped experts' `linear_fc1.weight3`.
_EXPERT = re.compile(r"^(.*)\.experts\.(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")
_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


def initialize_by_name(
    chunks: Sequence[Any], *, seed: int, std: float, num_layers: int, tp_group: Any
) -> None:
    """Fill every parameter of the chunks in place.

    Matrices are normal with `std`, the projections back into the residual stream with
    std / sqrt(2 * num_layers) as in GPT-2; norm weights are 1 and biases 0.

    Args:
        chunks: this rank's GPT models, not yet wrapped in DDP.
        seed: the same on all ranks.
        num_layers: of the whole model.
        tp_group: gives this rank's slice of tensor-parallel parameters.
    """
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            if param.dim() == 1:
                param.data.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = 1 / math.sqrt(2 * num_layers) if name.endswith(_OUTPUT_PROJECTIONS) else 1.0
            shape = full_shape(param, tp_group.size())
            whole = torch.randn(shape, generator=_generator(name, seed)) * (std * scale)
            param.data.copy_(local_slice(whole, param, tp_group.rank(), tp_group.size()))


def global_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a GPT chunk by their names in the whole model.

    Layers count from 0 over all stages, experts over all expert-parallel ranks, and a tied output
    layer is the embedding.
    """
    chunk = unwrapped(chunk)
    tied = chunk.share_embeddings_and_output_weights
    for stored_name, param in chunk.named_parameters():
        local_name = _with_global_expert(chunk, stored_name)
        match = _LAYER.match(local_name)
        if match:
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1
            yield f"decoder.layers.{layer}.{local_name[match.end() :]}", param
        elif tied and local_name == "output_layer.weight":
            # A last stage with MTP has the embedding as well, and projects with that.
            if not getattr(chunk, "mtp_process", False):
                yield "embedding.word_embeddings.weight", param
        else:
            yield local_name, param


def _with_global_expert(chunk: Any, name: str) -> str:
    match = _EXPERT.match(name)
    if match is None:
        return name
    indices = chunk.get_submodule(match[1]).local_expert_indices
    return f"{match[1]}.experts.{match[2]}{indices[int(match[3])]}{name[match.end() :]}"


def full_shape(param: Tensor, tp: int) -> tuple[int, ...]:
    """The parameter's shape on one rank without tensor parallelism."""
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= tp  # type: ignore[attr-defined]
    return tuple(shape)


def local_slice(whole: Tensor, param: Tensor, tp_rank: int, tp: int) -> Tensor:
    """This rank's part of a whole parameter (or gradient).

    With a stride (gate and up projection in one matrix) a rank holds a piece of each.
    """
    if not getattr(param, "tensor_model_parallel", False) or tp == 1:
        return whole
    dim = param.partition_dim  # type: ignore[attr-defined]
    stride = param.partition_stride  # type: ignore[attr-defined]
    pieces = whole.chunk(stride * tp, dim=dim)
    return torch.cat(pieces[tp_rank::tp], dim=dim)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def freeze(chunks: Sequence[Any], patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name in the whole model matches a glob.

    A collective over all ranks: a pattern may match nothing on one stage, but not in the whole
    model.

    Args:
        chunks: this rank's GPT models, not yet wrapped in DDP.
        patterns: `decoder.layers.0.*` is the first layer, `embedding.*` the embedding, and with
            tied embeddings the output projection too.

    Raises:
        ConfigError: on every rank, naming a pattern that matches nothing.
    """
    num_matches = torch.zeros(len(patterns), device=torch.cuda.current_device())
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            matches = [fnmatch.fnmatchcase(name, pattern) for pattern in patterns]
            num_matches += torch.tensor(matches, device=num_matches.device)
            if any(matches):
                param.requires_grad_(False)
    dist.all_reduce(num_matches)
    for pattern, found in zip(patterns, num_matches.tolist(), strict=True):
        if not found:
            raise ConfigError(
                f"model.freeze: no parameter matches {pattern!r}; names are like "
                "embedding.word_embeddings.weight or decoder.layers.0.mlp.linear_fc1.weight"
            )


def keep_gradients_through_recompute(chunks: Sequence[Any], config: Any) -> None:
    """Let recomputed modules behind a frozen embedding get their gradients.

    A recomputed layer, MLP or mixture of experts gets gradients only if its input requires one. The
    output of a frozen embedding does not, and the layers behind it would silently not be trained.
    """
    for chunk in chunks:
        embedding = getattr(unwrapped(chunk), "embedding", None)
        if embedding is None or config.recompute_granularity is None:
            continue
        asks = _ask_for_gradient in embedding._forward_hooks.values()
        if not asks and not any(param.requires_grad for param in embedding.parameters()):
            embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
