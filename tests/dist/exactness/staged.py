"""Pipeline stages that share one GPU: activations and gradients travel through the host.

NCCL refuses two ranks on one device, and gloo only sends host memory. gloo's other collectives
(reductions, broadcasts, gathers) accept CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.schedule import ScheduleAdapter
from megapack.schedule.p2p import PlannedP2PCommunicator
from megapack.schedule.runner import ScheduleRunner
from tests.rehearsal.recorder import unchecked

# With two stages, the next stage is also the previous one: tags distinguish the directions.
FORWARD = 0
BACKWARD = 1


class Transfer:
    """A handle as Megatron expects it; waiting for a receive copies the tensor to the device."""

    def __init__(self, work: Any, host: Tensor, arrived: Tensor | None = None) -> None:
        self.work = work
        self.host = host
        self.arrived = arrived

    def wait(self) -> None:
        """Wait until the host buffer is sent, or received and copied to the device."""
        self.work.wait()
        if self.arrived is not None:
            with torch.no_grad():
                self.arrived.copy_(self.host)


class StagedCommunicator(PlannedP2PCommunicator):
    """`PlannedP2PCommunicator` over gloo for tensors on any device."""

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Transfer] | None]:
        shapes = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        transfers: dict[str, Transfer] = {}
        if recv_prev:
            transfers["recv_prev"] = self._receive(shapes[0], self.prev_rank, FORWARD)
        if recv_next:
            transfers["recv_next"] = self._receive(shapes[1], self.next_rank, BACKWARD)
        if tensor_send_next is not None:
            transfers["send_next"] = self._send(tensor_send_next, self.next_rank, FORWARD)
        if tensor_send_prev is not None:
            transfers["send_prev"] = self._send(tensor_send_prev, self.prev_rank, BACKWARD)
        arrived = [
            transfers[name].arrived if name in transfers else None
            for name in ("recv_prev", "recv_next")
        ]
        if wait_on_reqs:
            for transfer in transfers.values():
                transfer.wait()
        return (*arrived, None if wait_on_reqs else transfers)

    def _send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        host = _host_buffer(tensor.shape, tensor.dtype).copy_(tensor.detach())
        with unchecked():
            return Transfer(dist.isend(host, to, group=self.pp_group, tag=tag), host)

    def _receive(self, shape: Sequence[int], source: int, tag: int) -> Transfer:
        dtype = self.config.pipeline_dtype
        host = _host_buffer(shape, dtype)
        device = torch.cuda.current_device()
        arrived = torch.empty(*shape, dtype=dtype, device=device, requires_grad=True)
        with unchecked():
            work = dist.irecv(host, source, group=self.pp_group, tag=tag)
        return Transfer(work, host, arrived)


class StagedRunner(ScheduleRunner):
    """A runner whose stages may share a device."""

    communicator_class = StagedCommunicator


class StagedAdapter(ScheduleAdapter):
    """An adapter whose stages may share a device."""

    runner_class = StagedRunner


def _host_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A host tensor; pinned if CUDA is available, so that its copies are plain DMA."""
    return torch.empty(*shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())
