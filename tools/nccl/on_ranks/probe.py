"""Tries NCCL's kinds of operations and says what they take.

    python -m tools.nccl.on_ranks.probe OUT

A communicator, an all-reduce, a batch of sends and receives, a lone pair of them, an all-to-all,
and a communicator of half of the ranks. Every number that arrives is checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megapack import launch
from tools.nccl.on_ranks.progress import note, write

_NUMEL = 1 << 16


def all_reduce(device: torch.device) -> None:
    world = dist.get_world_size()
    value = torch.full((_NUMEL,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(value)
    _check(value, torch.full_like(value, world * (world + 1) / 2))


def batched_p2p(device: torch.device) -> None:
    """Each rank sends to the next, and receives from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.full((_NUMEL,), float(rank), device=device)
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _check(received, torch.full_like(sent, float((rank - 1) % world)))


def lone_p2p(device: torch.device) -> None:
    """The first rank sends to the second, in a communicator of the two."""
    value = torch.full((_NUMEL,), 1.0 - dist.get_rank(), device=device)
    if dist.get_rank() == 0:
        dist.send(value, 1)
    elif dist.get_rank() == 1:
        dist.recv(value, 0)
        _check(value, torch.ones_like(value))


def all_to_all(device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(world, device=device).float() + rank * world
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    _check(received, torch.arange(world, device=device).float() * world + rank)


def split(device: torch.device) -> None:
    """Communicators of the even and of the odd ranks."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
    own = dist.get_rank() % 2
    value = torch.ones(_NUMEL, device=device)
    dist.all_reduce(value, group=groups[own])
    _check(value, torch.full_like(value, float(len(range(own, world, 2)))))


OPERATIONS: tuple[Callable[[torch.device], None], ...] = (
    *(all_reduce, batched_p2p, lone_p2p, all_to_all, split),
)


def _check(value: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(value, expected):
        raise RuntimeError(f"arrived: {value[:4].tolist()}, expected: {expected[:4].tolist()}")


def main(out: str) -> None:
    """Run each operation twice; rank 0 writes the seconds of both."""
    device = launch.start("cuda")
    seconds: dict[str, list[float]] = {}
    for operation in OPERATIONS:
        for _ in range(2):
            begin = time.perf_counter()
            operation(device)
            torch.cuda.synchronize()
            seconds.setdefault(operation.__name__, []).append(time.perf_counter() - begin)
            note(operation.__name__)
    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    write(out, {"seconds": seconds, "nccl": version and ".".join(map(str, version))})
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
