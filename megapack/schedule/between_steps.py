"""What a training loop leaves behind between two steps: cleared, handled or refused.

Megatron's DDP takes gradients from autograd through `param.grad`, which must be empty when a
backward begins, and adds them to `param.main_grad`. A loop easily leaves more behind:

- `param.grad` that is `param.main_grad`, as Megatron's fp32 optimizer and many loops set it: the
  first micro-batch would count twice. Cleared; the gradient itself is in `main_grad`.
- any other `param.grad`: it would be added to the step's gradient. Refused, unless it is zero.
- gradients of a step whose update is done: the next step would add to them. Refused.
- chunks in evaluation mode: no auxiliary losses of experts, no recompute. Refused.
- parameters frozen or unfrozen since DDP was made, which it does not notice. Refused.
- hooks on parameters that fused kernels would call without the gradient. Refused.
- `torch.autocast`: Megatron's config says how layers compute. Refused, for forward passes too.
- gathers of parameters that a forward would take for done (`overlap.gathering_again`). Handled.
- `no_sync` that was not left: Megatron's schedule ends it before the last micro-batch. Harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.head import unwrapped
from megapack.model.overlap import has_earlier_gradients, overlaps_reduction
from megapack.model.parameters import has_hooks
from megapack.schedule.checks import gradient_buffers, reduces

logger = logging.getLogger(__name__)

# Values of each parameter that are compared to find out whether an optimizer has changed it. Even
# at a learning rate that leaves most bf16 weights as they are, some of them change.
_SAMPLED_VALUES = 64
_DROPOUTS = ("hidden_dropout", "attention_dropout")
# Where Megatron's linear layers and Transformer Engine's say that they add to `main_grad`.
_FUSIONS = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")


class BetweenSteps:
    """Looks at a model before each call of an adapter.

    Args:
        chunks: the rank's model chunks, wrapped in DDP or not.
        config: the model's TransformerConfig.
    """

    def __init__(self, chunks: Sequence[Any], config: Any) -> None:
        self._chunks = chunks
        self._config = config
        self._weights: Tensor | None = None
        self._is_warned = False

    def check(self, *, is_training: bool) -> None:
        """Clear what may be cleared; call it before each pass, without communication.

        Raises:
            ConfigError: the pass would be wrong; names the parameter, and says what to do.
        """
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ConfigError(
                "torch.autocast is on: log-probs and gradients would be rounded, whatever the "
                "model's config says; call the adapter outside of it, and set bf16 in the config"
            )
        if is_training:
            self._check_training()

    def _check_training(self) -> None:
        if not torch.is_grad_enabled():
            raise ConfigError(
                "adapter.step computes no gradients within torch.no_grad() or inference_mode(); "
                "call it outside of them, or call adapter.forward"
            )
        for chunk in self._chunks:
            if not unwrapped(chunk).training:
                raise ConfigError(
                    "the model is in evaluation mode, where Megatron leaves out losses of routers "
                    "and recompute; call train() on each chunk before adapter.step (to train "
                    "without dropout, set hidden_dropout=attention_dropout=0.0)"
                )
        clear_gradients(self._chunks)
        self._check_updated()
        self._warn_of_dropout()

    def note_step(self) -> None:
        """Remember the weights with which gradients were computed; call it after each step."""
        self._weights = sampled(self._trained())

    def _trained(self) -> list[Tensor]:
        return [p for chunk in self._chunks for p in chunk.parameters() if p.requires_grad]

    def _warn_of_dropout(self) -> None:
        """Log once that gradients of a model with dropout depend on the packing.

        Megatron's default of both settings is 0.1.
        """
        values = [(name, getattr(self._config, name, 0.0)) for name in _DROPOUTS]
        names = [f"{name}={value}" for name, value in values if value]
        if names and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s: dropout draws other numbers for each packing and layout, so gradients depend "
                "on them, and old log-probs are computed without it; set hidden_dropout="
                "attention_dropout=0.0",
                ", ".join(names),
            )

    def _check_updated(self) -> None:
        """Raise ConfigError if the weights have changed and their gradients are still there."""
        before, self._weights = self._weights, None
        if before is None or not has_gradients(self._chunks):
            return
        now = sampled(self._trained())
        if now.shape != before.shape or not torch.equal(now, before):
            buffers = "zero_grad_buffer() on each chunk and " if reduces(self._chunks) else ""
            raise ConfigError(
                "the weights have changed since the last step, and its gradients are still there: "
                f"this step would add to them; call {buffers}optimizer.zero_grad() after "
                "optimizer.step()"
            )


def clear_gradients(chunks: Sequence[Any]) -> None:
    """Empty every `param.grad` that is DDP's `main_grad`, and refuse what DDP would not notice.

    Chunks without Megatron's DDP keep their gradients in `param.grad`, and stay as they are.

    Raises:
        ConfigError: names the parameter whose gradient would be wrong, and says what to do.
    """
    for chunk in chunks:
        found = gradient_buffers(chunk)
        buffers = {buffer.grad_data.untyped_storage().data_ptr() for buffer in found}
        if not buffers:
            continue
        is_reduced = any(buffer.data_parallel_world_size > 1 for buffer in found)
        for name, param in unwrapped(chunk).named_parameters():
            _check_trained(name, param, is_reduced, overlaps=overlaps_reduction(chunk))
            grad = param.grad if param.requires_grad else None
            if grad is None:
                continue
            if grad.untyped_storage().data_ptr() not in buffers and bool(grad.any()):
                raise ConfigError(
                    f"{name}.grad holds a gradient of before the step, which Megatron's DDP would "
                    "add to the step's; call optimizer.zero_grad() before the step (its own "
                    f"gradient will be in {name}.main_grad)"
                )
            param.grad = None
        _check_hooks(chunk)


def has_gradients(chunks: Sequence[Any]) -> bool:
    """Whether the next step adds to the gradients of steps before it."""
    if reduces(chunks):
        return has_earlier_gradients(chunks)
    return any(param.grad is not None for chunk in chunks for param in chunk.parameters())


def _check_trained(name: str, param: Any, is_reduced: bool, *, overlaps: bool) -> None:
    """Raise ConfigError if a parameter has changed `requires_grad` since DDP was made.

    A parameter that DDP does not know has its gradient in `param.grad`. With one data-parallel rank
    nothing must be added to it: AReaL adds LoRA's adapters after DDP was made.
    """
    has_buffer = hasattr(param, "main_grad")
    if param.requires_grad and not has_buffer and is_reduced:
        raise ConfigError(
            f"{name} requires a gradient and has no main_grad: it was frozen when the model was "
            "wrapped in DDP, which would not reduce its gradient; set requires_grad before "
            "wrapping the model, or freeze it again"
        )
    if overlaps and has_buffer and not param.requires_grad:
        raise ConfigError(
            f"{name} was frozen after the model was wrapped in DDP, whose overlap_grad_reduce "
            "waits for its gradient; set requires_grad before wrapping the model, or "
            "overlap_grad_reduce=False"
        )


def _check_hooks(chunk: Any) -> None:
    """Raise ConfigError for hooks that see no gradient, as the layer adds it to `main_grad`."""
    for path, module in unwrapped(chunk).named_modules():
        if not any(getattr(module, name, False) for name in _FUSIONS):
            continue
        for name, param in module.named_parameters(recurse=False):
            if param.ndim > 1 and param.requires_grad and has_hooks(param):
                raise ConfigError(
                    f"{path}.{name} has a hook, and its layer adds the gradient to main_grad "
                    "without autograd, so the hook would not see it; remove the hook, or set "
                    "gradient_accumulation_fusion=False"
                )


def sampled(params: Iterable[Tensor]) -> Tensor:
    """A few values of each parameter, copied: one small kernel."""
    # Slicing weights that are kept in FP8, which have a type of their own, converts them.
    plain = [param.detach() for param in params if type(param) is torch.nn.Parameter]
    return torch.cat([values.reshape(-1)[:_SAMPLED_VALUES] for values in plain] or [torch.zeros(1)])
