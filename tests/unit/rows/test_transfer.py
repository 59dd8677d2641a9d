"""A row's tensors reach the device as views of one copy."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import megapack.rows.transfer
from megapack import Layout, MicroBatch
from megapack.model.experts.rows import RoutingShape, routing_row
from megapack.rows.packed import PackedRow, pack_row
from megapack.rows.transfer import host_copies, host_like, moved
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def packed() -> PackedRow:
    """A row with fields of several dtypes, routing and two rows ahead."""
    batch = SampleBatch([[5, 6, 7], [8, 9]], fields={"reward": [0.5, 1.5], "flag": [True, False]})
    micro_batch = MicroBatch((1, 0), row_tokens=6, tokens=5, tokens_sq=13, padded_tokens=5)
    row = pack_row(batch, micro_batch, Layout(), num_ahead=2)
    choices = [torch.zeros(3, 1, 1), torch.zeros(2, 1, 1)]
    shape = RoutingShape(num_layers=1, num_experts=4, top_k=1)
    routing = routing_row(row, torch.arange(6), [c.long() for c in choices], shape)
    return replace(row, routing=routing)


def tensors(row: PackedRow, *, on_host: bool = False) -> dict[str, Tensor]:
    """The tensors of a row that move to the device, or those that stay on the host, by name."""
    assert row.routing is not None
    found = {f"sample_fields.{k}": v for k, v in row.sample_fields.items()}
    found |= {f"routing.{k}": v for k, v in vars(row.routing).items() if isinstance(v, Tensor)}
    for depth, own in enumerate((row, *row.ahead)):
        for part in (own, own.losses):
            found |= {f"{depth}.{k}": v for k, v in vars(part).items() if isinstance(v, Tensor)}
        found |= {f"fields.{k}": v for k, v in own.losses.fields.items()}
    on_the_host = ("positions_N", "tokens_O", "samples_O", "offsets_O")
    return {k: v for k, v in found.items() if (k.split(".")[1] in on_the_host) == on_host}


def test_doctests_of_the_module() -> None:
    assert doctest.testmod(megapack.rows.transfer).failed == 0


def test_all_tensors_of_a_row_are_in_one_buffer() -> None:
    row = packed()
    there = row.to(CPU)
    before = tensors(row)
    after = tensors(there)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name], value), name
    assert len({value.untyped_storage().data_ptr() for value in after.values()}) == 1
    assert all(value.data_ptr() % 16 == 0 for value in after.values())
    shared = {v.data_ptr() for v in after.values() if v.numel()}
    assert len(shared) == len({id(v) for v in before.values() if v.numel()}), "a tensor moved twice"


def test_what_only_the_host_reads_stays_there() -> None:
    row = packed()
    before = tensors(row, on_host=True)
    assert before
    after = tensors(row.to("meta"), on_host=True)
    assert all(after[name] is value for name, value in before.items())
    assert {value.device.type for value in tensors(row.to("meta")).values()} == {"meta"}


def test_what_is_not_a_tensor_stays() -> None:
    row = packed()
    there = row.to(CPU)
    assert there.samples is row.samples
    assert there.padded_lengths == row.padded_lengths == (2, 3, 1)
    assert there.routing is not None
    assert row.routing is not None
    assert there.routing.recorded is row.routing.recorded


def test_the_copy_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    original = Tensor.to

    def to(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append((*args, kwargs))
        return original(self, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    row = packed()
    monkeypatch.setattr(Tensor, "to", to)
    row.to(CPU)
    assert calls == [(CPU, {"non_blocking": True})]


def test_tensors_of_any_layout_and_shape() -> None:
    @dataclass(frozen=True)
    class Value:
        one: Tensor
        kept: dict[str, Tensor] = field(metadata={"moves": False})

    kept = {"x": torch.ones(1)}
    transposed = torch.arange(6).reshape(2, 3).t()
    found = moved((Value(transposed, kept), torch.tensor(7.0), torch.zeros(0, 3)), "cpu")
    assert torch.equal(found[0].one, transposed)
    assert found[0].kept is kept
    assert found[1].item() == 7.0
    assert found[2].shape == (0, 3)


class OnGpu(Tensor):
    """A tensor of the host that says it is on CUDA."""

    is_cuda = True


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does for copies from CUDA: pinned memory, copies, waits."""
    done: list[str] = []
    like = torch.empty_like
    copy = Tensor.copy_

    def empty_like(tensor: Tensor, *, pin_memory: bool, **kwargs: Any) -> Tensor:
        done.append("pinned" if pin_memory else "pageable")
        return like(tensor.as_subclass(Tensor), **kwargs)

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        done.append("copy" if non_blocking else "copy and wait")
        return copy(self, source.as_subclass(Tensor), non_blocking)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    return done


def test_the_host_waits_once_for_copies_from_a_gpu(waits: list[str]) -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3])]
    found = host_copies([value.as_subclass(OnGpu) for value in values])
    assert waits == ["pinned", "copy", "pinned", "copy", "wait"]
    assert [value.tolist() for value in found] == [[1.0, 2.0], [3]]


def test_the_host_does_not_wait_for_copies_within_it(waits: list[str]) -> None:
    host_copies([torch.ones(2)])
    assert waits == ["pageable", "copy"]


def test_a_host_copy_is_no_parameter_and_shares_no_memory() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    (found,) = host_copies([param])
    param.data.fill_(5.0)
    assert found.tolist() == [1.0, 1.0]
    assert not found.requires_grad
    assert not host_like(param).requires_grad
