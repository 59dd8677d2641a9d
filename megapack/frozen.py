"""Parameters that are not trained: chosen by name, and safe under recompute."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError
from megapack.head import unwrapped
from megapack.init import global_parameters


def freeze(chunks: Sequence[Any], patterns: Sequence[str]) -> None:
    """Take the gradient from parameters whose name in the whole model matches a glob.

    A collective over all ranks: a stage may have none of the parameters, the model must.

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
    """Let what is recomputed behind a frozen embedding get its gradients.

    A recomputed layer, MLP or mixture of experts sees gradients only where its input asks for one.
    A frozen embedding's output does not, and what stands behind it would train on nothing, in
    silence.
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
