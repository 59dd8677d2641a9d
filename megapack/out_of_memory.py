"""A GPU out of memory in a step that may be tried again.

The other ranks wait for what the schedule says that this one sends. So it goes on through the
schedule and sends zeros of the planned shapes, works no more, and says at the step's end what
happened; gradients are not reduced. The process groups are as good as before.

Ranks must not meet inside layers, where nobody could say which collectives are left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megapack import cpu, settings
from megapack.consensus import agree, on_any_rank
from megapack.errors import ScheduleError, StepOutOfMemory
from megapack.forward import DeviceRow, ForwardStep
from megapack.head import unwrapped
from megapack.layout import Layout, why_no_retry


def check_retry(layout: Layout, chunks: Sequence[Any], config: Any) -> None:
    """Raise ScheduleError where a step out of memory cannot be carried to its end."""
    if reason := why_no_retry(tp=layout.tp, cp=layout.cp, ep=layout.ep):
        raise ScheduleError(
            f"steps out of memory cannot be tried again with {reason}; set train.on_oom=error "
            "(retries_oom=False)"
        )
    if layout.dp > 1 and settings.shares_fp8_scales(config):
        raise ScheduleError(
            f"steps out of memory cannot be tried again with dp={layout.dp} and "
            "fp8_recipe='delayed': ranks meet after each forward to share scales; set "
            "tp_only_amax_red=True, another recipe, or train.on_oom=error (retries_oom=False)"
        )
    for chunk in chunks:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(getattr(chunk, "ddp_config", None), name, False):
                raise ScheduleError(
                    f"steps out of memory cannot be tried again with {name}: ranks meet in the "
                    "middle of forwards or backwards; set it to False"
                )


class OutOfMemoryCarrier:
    """Carries one pass over a step's rows to its end, whatever memory it lacks.

    Args:
        config: Megatron's, of the model.
        device: of the collectives.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        self._config, self._device = config, device
        self._message = ""
        self._failed_anywhere: bool | None = None

    def forward(self, forward: ForwardStep) -> ForwardStep:
        """The same forward; zeros once memory has run out."""

        def carried(
            rows: Iterator[DeviceRow], model: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
            row = next(rows)
            found = self._tried(lambda: forward(iter([row]), model))
            if found is None:
                is_last = unwrapped(model).post_process
                return self._stand_in(row, model), _no_loss if is_last else None
            output, loss_function = found
            if loss_function is None:
                return output, None
            return (
                output,
                lambda hidden: self._tried(lambda: loss_function(hidden)) or _no_loss(hidden),
            )

        return carried

    @contextlib.contextmanager
    def backwards(self) -> Iterator[None]:
        """Within the block Megatron's schedules get zeros from backwards without memory."""
        original = schedules.backward_step

        def backward_step(input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._tried(lambda: [original(input_tensor, *args, **kwargs)])
            return _zeros(input_tensor) if found is None else found[0]

        schedules.backward_step = backward_step
        try:
            yield
        finally:
            schedules.backward_step = original

    def agree(self) -> bool:
        """Whether any rank ran out of memory so far; a collective of all ranks, the first time."""
        if self._failed_anywhere is None:
            (found,) = on_any_rank([bool(self._message)], device=self._device)
            self._failed_anywhere = found
        return self._failed_anywhere

    def raise_on_all(self) -> None:
        """At the step's end; a collective of all ranks.

        Raises:
            StepOutOfMemory: on every rank where one ran out, naming those that did.
        """
        if not self.agree():
            return

        def tell() -> None:
            if self._message:
                raise StepOutOfMemory(self._message)

        try:
            agree(tell, device=self._device)
        except ScheduleError as error:
            raise StepOutOfMemory(str(error)) from None

    def _tried(self, work: Callable[[], Any]) -> Any:
        """What the work gives; None where memory has run out, now or before."""
        if self._message:
            return None
        try:
            return work()
        except torch.OutOfMemoryError as error:
            self._message = str(error).partition("\n")[0] or "out of memory"
        # Outside of the handler: the traceback kept the activations alive.
        if cpu.uses_cuda():
            torch.cuda.empty_cache()
        return None

    def _stand_in(self, device_row: DeviceRow, model: Any) -> Tensor:
        """Zeros of the output's shape, through which zeros go back to the chunk's input."""
        chunk = unwrapped(model)
        if not chunk.pre_process:
            return chunk.decoder.input_tensor * 0.0
        row, config = device_row.row, self._config
        shape = (row.tokens_T.numel(), 1, config.hidden_size)
        dtype = config.pipeline_dtype or config.params_dtype
        return torch.zeros(
            shape, dtype=dtype, device=row.tokens_T.device, requires_grad=torch.is_grad_enabled()
        )


def _no_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """See `forward.LastStage`: a loss of 0, through which zeros go back."""
    zero = hidden.sum(dtype=torch.float32) * 0.0
    return zero, torch.zeros((), dtype=torch.int, device=hidden.device), {}


def _zeros(tensors: Any) -> Any:
    if isinstance(tensors, list):
        return [_zeros(tensor) for tensor in tensors]
    return None if tensors is None else torch.zeros_like(tensors)
