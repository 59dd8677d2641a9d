"""The ledger of devices: what it notes of tensors, and what it counts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.job_in_process import job_of_one
from tests.rehearsal.device_ledger import DeviceLedger, Kind
from tests.rehearsal.places import Place, is_on_gpu, place_of
from tests.rehearsal.pretended_cuda import rehearsed_gpu

pytestmark = pytest.mark.unit


@pytest.fixture
def ledger() -> Iterator[DeviceLedger]:
    with rehearsed_gpu() as opened:
        yield opened


def whats(ledger: DeviceLedger, kind: Kind) -> dict[str, int]:
    """What was counted of a kind, and how often."""
    return {entry.what: count for entry, count in ledger.of(kind).items()}


def run(code: str, ledger: DeviceLedger) -> Any:
    """The value of an expression over tensors of both places; what was counted is of it alone."""
    names = {
        "torch": torch,
        "gpu": torch.arange(6.0, device="cuda"),
        "host": torch.arange(6.0),
        "ids": torch.arange(6, device="cuda"),
        "mask": torch.arange(6, device="cuda") > 2,
        "one": torch.ones((), device="cuda"),
        "module": torch.nn.Linear(2, 2),
        "pinned": torch.zeros(6, pin_memory=True),
    }
    ledger.entries.clear()
    return eval(code, names)


ON_GPU = [
    *("torch.zeros(2, device='cuda')", "torch.empty_like(host, device='cuda')", "host.cuda()"),
    *("host.to('cuda')", "host.to(gpu)", "host.to('cuda', torch.float64, non_blocking=True)"),
    *("module.cuda().weight", "module.to('cuda').bias", "torch.as_tensor(host, device='cuda')"),
    *(
        "gpu + 1",
        "gpu[1:].view(1, -1)",
        "gpu.new_zeros(2)",
        "torch.zeros_like(gpu)",
        "gpu.double()",
    ),
    *("torch.tensor([1.0], device=gpu.device)", "gpu.detach().clone()", "gpu.cuda()"),
    *("host.new_tensor([1], device='cuda')", "torch.nn.functional.one_hot(ids, 6)"),
    "torch.nn.Parameter(gpu)",
]
ON_HOST = [
    *("torch.zeros(2)", "gpu.cpu()", "gpu.to('cpu', torch.float64)", "host.to(torch.float64)"),
    *("torch.empty_like(gpu, device='cpu')", "gpu.new_zeros(2, device='cpu')", "host + 1"),
    *("torch.tensor([1.0])", "host.copy_(gpu)", "torch.as_tensor(gpu, device='cpu')"),
]
PINNED = [
    *("torch.empty(3, pin_memory=True)", "host.pin_memory()", "pinned[2:]"),
    "gpu.to('cpu', non_blocking=True)",
]
PLACES = {Place.GPU: ON_GPU, Place.HOST: ON_HOST, Place.PINNED: PINNED}


@pytest.mark.parametrize(
    ("code", "place"), [(code, place) for place, codes in PLACES.items() for code in codes]
)
def test_a_tensor_is_where_a_gpu_run_would_have_it(
    code: str, place: Place, ledger: DeviceLedger
) -> None:
    found = run(code, ledger)
    assert place_of(found) is place
    assert found.device.type == ("cuda" if place is Place.GPU else "cpu")
    assert found.is_cuda is (place is Place.GPU)
    assert found.is_pinned() is (place is Place.PINNED)


WAITS = {
    "item": [
        *("gpu.sum().item()", "bool(one)", "int(one)", "float(one)", "gpu[: one.long()]"),
    ],
    "nonzero": ["gpu.nonzero()", "torch.argwhere(gpu)"],
    "index by a mask": ["gpu[mask]", "gpu.__setitem__(mask, one)", "gpu[:, None][mask, 0]"],
    "masked_select": ["gpu.masked_select(mask)"],
    "allclose": ["torch.allclose(gpu, gpu)"],
    "equal": ["torch.equal(gpu, gpu + 0)", "torch.equal(gpu[:3], gpu[3:])"],
    "_unique2": ["torch.unique(gpu)"],
    "unique_consecutive": ["torch.unique_consecutive(gpu)"],
    "repeat_interleave": ["torch.repeat_interleave(gpu, ids)"],
    "bincount": ["torch.bincount(ids)"],
    "tolist": ["gpu.tolist()"],
    "copy to the host": [
        *("gpu.cpu()", "gpu.to('cpu')", "host.copy_(gpu)", "host.copy_(gpu, non_blocking=True)"),
        *("pinned.copy_(gpu)", "torch._foreach_copy_([host], [gpu])"),
    ],
    "copy to the GPU": [
        *("host.cuda()", "host.to('cuda', non_blocking=True)", "pinned.cuda()", "gpu.copy_(host)"),
        *("torch.tensor([1.0], device='cuda')", "torch.as_tensor(host, device='cuda')"),
        "gpu.new_tensor([1.0])",
    ],
    "index on the host": ["gpu[[0, 2]]", "gpu[host.long()]", "gpu[host > 1]"],
    "torch.cuda.synchronize": ["torch.cuda.synchronize()"],
    "torch.cuda.Event.synchronize": ["torch.cuda.Event.synchronize(None)"],
    "torch.cuda.Stream.synchronize": ["torch.cuda.Stream.synchronize(None)"],
}


@pytest.mark.parametrize(
    ("code", "what"), [(code, what) for what, codes in WAITS.items() for code in codes]
)
def test_a_wait_is_counted_once(code: str, what: str, ledger: DeviceLedger) -> None:
    run(code, ledger)
    assert whats(ledger, "wait") == {what: 1}
    assert not ledger.of("mixed")


@pytest.mark.parametrize(
    "code",
    [
        *("gpu[ids]", "gpu[1:] + 1", "torch.where(mask, gpu, 0)", "gpu * host[0]", "gpu.add_(1)"),
        *("gpu.__setitem__(mask, 1.0)", "torch.equal(gpu, gpu)", "gpu.masked_fill(mask, host[1])"),
        *("torch.repeat_interleave(gpu, ids, output_size=15)", "gpu.to(torch.float64)"),
        *("pinned.to('cuda', non_blocking=True)", "gpu.to('cpu', non_blocking=True)"),
        *("pinned.copy_(gpu, non_blocking=True)", "gpu.copy_(pinned, non_blocking=True)"),
        *("host.sum().item()", "host.tolist()", "host[host > 1]", "host.nonzero()", "gpu.cuda()"),
        *("torch.full((2,), 3.0, device='cuda')", "torch.randperm(3, device='cuda')"),
        "torch._foreach_mul_([gpu], host[1])",
    ],
)
def test_nothing_is_counted_where_nothing_waits(code: str, ledger: DeviceLedger) -> None:
    run(code, ledger)
    assert not ledger.entries


@pytest.mark.parametrize(
    "code",
    [
        *("gpu + host", "torch.cat([gpu, host])", "torch.stack([one, host[0]])", "gpu @ host"),
        *("host.add_(one)", "host[ids]", "gpu.index_copy_(0, ids, host)", "gpu.numpy()"),
        *("host[0].add_(one)", "torch.add(gpu, 1, out=host)", "gpu.index_select(0, host.long())"),
        "torch.nn.functional.linear(gpu[:2], module.weight)",
    ],
)
def test_an_operation_over_both_places_is_reported(code: str, ledger: DeviceLedger) -> None:
    run(code, ledger)
    assert ledger.of("mixed").total() == 1


def test_an_entry_has_the_line_that_waits(ledger: DeviceLedger) -> None:
    with ledger.phase("reading"):
        torch.ones(3, device="cuda").tolist()
    (entry,) = ledger.entries
    lines, first = inspect.getsourcelines(test_an_entry_has_the_line_that_waits)
    assert entry.frame.file == "tests/rehearsal/test_device_ledger.py"
    assert "tolist" in lines[entry.frame.line - first]
    assert entry.place.endswith("test_an_entry_has_the_line_that_waits: tolist")
    assert ledger.of("wait", "reading") == ledger.of("wait")
    assert not ledger.of("wait", "another phase")


class Reads(torch.autograd.Function):
    """Reads its input's gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad.sum().item()
        return grad


def test_backwards_are_seen_and_gradients_are_on_the_gpu(ledger: DeviceLedger) -> None:
    weight = torch.ones(3, device="cuda", requires_grad=True)
    Reads.apply(weight * 2).sum().backward()
    (entry,) = ledger.of("wait")
    assert entry.frame.function == "backward"
    assert weight.grad is not None
    assert is_on_gpu(weight.grad)


def test_a_kernel_takes_tensors_of_the_gpu_alone(ledger: DeviceLedger) -> None:
    gpu = torch.ones(3, device="cuda")
    host = torch.zeros(3)
    ledger.kernel("good", lambda x: x + x.tolist()[0] + x.sum().item(), (gpu,), {})
    assert not ledger.entries
    made = ledger.kernel("bad", lambda x, y: x + y[0], (gpu, [host]), {})
    assert is_on_gpu(made)
    assert whats(ledger, "mixed") == {"bad gets host tensors host [3]": 1}


def test_collectives_take_tensors_of_their_groups_place(ledger: DeviceLedger) -> None:
    with job_of_one():
        gpu = torch.ones(3, device="cuda")
        gloo = dist.new_group(backend="gloo")
        nccl = dist.new_group()
        # `job_of_one` asked for gloo.
        ledger.host_groups.discard(nccl.group_name)
        dist.all_reduce(gpu, group=nccl)
        dist.all_reduce(torch.ones(3), group=gloo)
        assert not ledger.entries
        dist.all_reduce(torch.ones(3), group=nccl)
        dist.all_gather([torch.ones(3)], gpu, group=nccl)
        dist.all_reduce(gpu, group=gloo)
    assert whats(ledger, "collective") == {
        "allreduce gets host tensors host [3]": 1,
        "allgather gets host tensors host [3]": 1,
        "allreduce gets GPU tensors gpu [3]": 1,
    }


def test_nccl_waits_for_barriers_and_objects(ledger: DeviceLedger) -> None:
    with job_of_one():
        nccl = dist.new_group()
        gloo = dist.new_group(backend="gloo")
        for group in (nccl, gloo):
            dist.barrier(group=group)
            dist.all_gather_object([None], "text", group=group)
    assert whats(ledger, "wait") == {"barrier": 1, "all_gather_object": 1}
    assert not ledger.of("collective")


def test_torch_is_itself_again_after_the_block() -> None:
    before = torch.zeros, torch.Tensor.to, torch.Tensor.device, torch.nn.Module.cuda
    with rehearsed_gpu():
        assert torch.zeros is not before[0]
    assert before == (torch.zeros, torch.Tensor.to, torch.Tensor.device, torch.nn.Module.cuda)
