"""Experts beside a dense MLP, each with norms of their own (Gemma 4).

    x -> norm -> MLP     -> norm -+
    x -> norm -> experts -> norm -+-> the layer's norm of what it adds
    x -> router

Megatron's layer of experts has the MLP as its shared expert and one input for all three. Here it
gets x, and norms are put around its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapack.model.experts.router import PackedRouter


class NormedRouter(PackedRouter):
    """A `PackedRouter` that normalises its input, and multiplies it and the chosen scores.

    `input_scale` has a factor per channel, `score_scale` one per expert.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, size in (
            ("input_scale", self.config.hidden_size),
            ("score_scale", self.config.num_moe_experts),
        ):
            ones = torch.ones(size, dtype=self.config.params_dtype, device=self.weight.device)
            param = torch.nn.Parameter(ones)
            param.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
            setattr(self, name, param)

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PackedRouter.forward`."""
        width = input.shape[-1]
        normed = torch.nn.functional.rms_norm(input, (width,), eps=self.config.layernorm_epsilon)
        scaled = normed * self.input_scale * width**-0.5
        probabilities, chosen = super().forward(scaled, padding_mask, **others)
        return probabilities * self.score_scale, chosen


def add_inner_norms(experts: Any, new_norm: Callable[[], torch.nn.Module]) -> None:
    """Put norms before and after the shared expert and the experts of one of Megatron's MoELayers.

    Args:
        new_norm: makes a norm of hidden states.
    """
    for name in ("pre_shared", "post_shared", "pre_experts", "post_experts"):
        setattr(experts, f"{name}_layernorm", new_norm())
    experts.shared_experts.register_forward_pre_hook(
        lambda _, args: (experts.pre_shared_layernorm(args[0]),)
    )
    experts.shared_experts.register_forward_hook(
        lambda _, args, output: experts.post_shared_layernorm(output)
    )
    dispatcher = experts.token_dispatcher
    dispatcher.dispatch_preprocess = partial(
        _normed_first, experts.pre_experts_layernorm, dispatcher.dispatch_preprocess
    )
    dispatcher.combine_postprocess = partial(
        _normed_last, experts.post_experts_layernorm, dispatcher.combine_postprocess
    )


def _normed_first(norm: Any, dispatch: Any, hidden_states: Tensor, *args: Any) -> Any:
    return dispatch(norm(hidden_states), *args)


def _normed_last(norm: Any, combine: Any, hidden_states: Tensor) -> Tensor:
    return norm(combine(hidden_states))  # type: ignore[no-any-return]
