"""Parameters of any Megatron-Core GPT by their names in the whole model, and marks on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_tensor_model_parallel_attributes,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megapack.model.head import unwrapped

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Expert 3 is `local_experts.3.linear_fc1.weight` in SequentialMLP, `linear_fc1.weight3` in grouped
# experts. Both have the first name in the whole model.
EXPERT = re.compile(r"^(.*)\.experts\.local_experts\.(\d+)\.(.*)$")
GROUPED_EXPERT = re.compile(r"^(.*)\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
# Transformer Engine fuses a norm with the projection after it: the beginning of the parameters'
# names there -> in Megatron's local layers, where the norm is a module.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    # Not fused: HybridModel's name of the last norm.
    "decoder.final_norm.": "decoder.final_layernorm.",
}


def is_expert(name: str) -> bool:
    """Whether the parameter of this name belongs to experts; routers and shared experts do not.

    >>> is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    True
    >>> is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
    False
    """
    return ".experts." in name


def local_name(name: str) -> str:
    """A parameter's name in Megatron's local layers; other names stay.

    >>> local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    """
    for fused, norm in _FUSED_NORMS.items():
        name = name.replace(fused, norm)
    # Megatron-Core 0.19 has parameters where 0.18, and checkpoints of both, have a module.
    return name.replace("mixer.conv1d_", "mixer.conv1d.")


def global_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a GPT chunk with their names in the whole model.

    Layers are numbered from 0 over all stages, experts over all expert-parallel ranks. An expert
    has the same names whether experts run one by one or grouped, a norm whether or not it is fused
    with the projection after it. A tied output layer has the name of the embedding.
    """
    chunk = unwrapped(chunk)
    tied = chunk.share_embeddings_and_output_weights
    for stored_name, param in chunk.named_parameters():
        name = local_name(_with_global_expert(chunk, stored_name))
        match = _LAYER.match(name)
        if match:
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1
            yield f"decoder.layers.{layer}.{name[match.end() :]}", param
        elif tied and name == "output_layer.weight":
            # A last stage with MTP also has the embedding, and projects with that.
            if not getattr(chunk, "mtp_process", False):
                yield "embedding.word_embeddings.weight", param
        else:
            yield name, param


def _with_global_expert(chunk: Any, name: str) -> str:
    if match := EXPERT.match(name):
        layer, local, part = match.groups()
    elif match := GROUPED_EXPERT.match(name):
        layer, part, local = match.groups()
    else:
        return name
    index = chunk.get_submodule(layer).local_expert_indices[int(local)]
    return f"{layer}.experts.local_experts.{index}.{part}"


def mark_experts(chunks: Sequence[Any]) -> None:
    """Have DDP reduce gradients of experts over the ranks that hold the same experts.

    Megatron-Core 0.16.1 marks them so only under expert parallelism. Without it, and with whole
    experts on each tensor-parallel rank (tp=2, etp=1, ep=1), it would reduce over data-parallel
    ranks alone, and leave out the tokens of the other tensor-parallel ranks. So these are among the
    ranks over which DDP reduces, and Megatron must not sum over them again, for which it marks
    biases under sequence parallelism.

    Args:
        chunks: this rank's GPT models, not yet wrapped in DDP.
    """
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if is_expert(name):
                param.allreduce = False
                param.sequence_parallel = False


def mark_splits(chunk: Any, *, etp: int, gated: bool) -> None:
    """Mark how tensor-parallel ranks split weights where Megatron's layers do not say it.

    Megatron takes a parameter that is not marked as split for one that all tensor-parallel ranks
    have, and counts it in the gradient norm, and so in clipping, on the first of them. Transformer
    Engine marks each weight as split by rows, unless it splits the weight by columns itself. Four
    kinds are otherwise:

    - Megatron splits experts itself: their second projections by columns, and each half of a first
      projection with a gate.
    - Experts that each lie on one rank (etp=1) are not the same ones on all tensor-parallel ranks,
      nor are their biases.
    - Megatron and Transformer Engine split sinks by heads and do not say so.
    - Every rank has multi-latent attention's down projections whole, as a plain `TELinear`. Marked
      as split, each rank's copy would begin with other weights, and all copies would count in the
      gradient norm. Megatron-Core 0.19 marks them as whole.

    An optimizer that exists already copied the marks when it was made; those of its fp32 weights
    are written again.

    Args:
        etp: tensor-parallel ranks of each expert.
        gated: whether fc1 is a gate and an up projection, stored as one.
    """
    for prefix, module in unwrapped(chunk).named_modules():
        is_whole = type(module).__name__ == "TELinear"
        for last, param in module.named_parameters(recurse=False):
            name = f"{prefix}.{last}"
            is_of_expert = bool(GROUPED_EXPERT.match(name) or EXPERT.match(name))
            if is_of_expert and param.dim() == 2:
                rows = "linear_fc1" in name
                param.partition_dim = 0 if rows else 1
                param.partition_stride = 2 if rows and gated else 1
            elif last == "softmax_offset" or (is_of_expert and etp == 1):
                param.tensor_model_parallel = True
                param.partition_dim = 0
                param.partition_stride = 1
            elif is_whole:
                param.tensor_model_parallel = False
            else:
                continue
            if getattr(param, "main_param", None) is not None:
                copy_tensor_model_parallel_attributes(param.main_param, param)


def has_hooks(param: Any) -> bool:
    """Whether somebody follows or changes the gradient that autograd gives a parameter."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def keep_gradients_through_recompute(chunks: Sequence[Any], config: Any) -> None:
    """Make sure that recomputed modules after a frozen embedding get their gradients.

    A recomputed layer, MLP or mixture of experts gets gradients only if its input requires a
    gradient. The output of a frozen embedding does not, so the next layers would silently not be
    trained.
    """
    for chunk in chunks:
        embedding = getattr(unwrapped(chunk), "embedding", None)
        if embedding is None or config.recompute_granularity is None:
            continue
        has_hook = _require_gradient in embedding._forward_hooks.values()
        if not has_hook and not any(param.requires_grad for param in embedding.parameters()):
            embedding.register_forward_hook(_require_gradient)


def gather_norm_outputs(chunks: Sequence[Any]) -> None:
    """Let Megatron gather the norms' outputs that adapters read, and not Transformer Engine.

    Under sequence parallelism Megatron-Bridge's adapters ask a projection with a fused norm for the
    norm's output of all tensor-parallel ranks (`return_layernorm_output_gathered`). Transformer
    Engine 2.9 to 2.20 give it, and their backward leaves out its gradient: earlier layers would
    train without what comes through the adapters. Idempotent.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if getattr(module, "return_layernorm_output_gathered", False) and module.sequence_parallel:
            module.return_layernorm_output_gathered = False
            module.register_forward_hook(_gather_norm_output)


def _gather_norm_output(module: Any, inputs: Any, output: Any) -> Any:
    # (product, bias, norm's output), or ((product, norm's output), None).
    if len(output) == 3:
        return (*output[:2], gather_from_sequence_parallel_region(output[2]))
    (product, normed), bias = output
    return (product, gather_from_sequence_parallel_region(normed)), bias


def _require_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
