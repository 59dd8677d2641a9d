"""A row's tensors reach the device as views of one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack import Layout, build_dp_schedule
from megapack.model.experts.rows import RoutingShape, collect_routing, routing_row
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.transfer import host_copies, host_like, moved
from megapack.samples import SampleBatch
from tests.groups import RankOf

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


BATCH = SampleBatch([[5, 6, 7], [8, 9]], fields={"reward": [0.5, 1.5], "flag": [True, False]})
STEP = build_dp_schedule(BATCH.lengths, layout=Layout(), max_tokens_per_gpu=5).steps[0]
SHAPE = RoutingShape(num_layers=1, num_experts=4, top_k=1)


def packed() -> PackedRow:
    """A row with fields of several dtypes, routing and two rows ahead."""
    row = pack_row(BATCH, STEP.ranks[0][0], Layout(), num_ahead=2)
    choices = [torch.zeros(n, 1, 1, dtype=torch.int64) for n in BATCH.lengths]
    return replace(row, routing=routing_row(row, torch.arange(5), choices, SHAPE))


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value, in one order."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors([getattr(value, f.name) for f in fields(value)])
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def test_a_row_moves_whole_in_one_buffer() -> None:
    row = packed()
    pairs = list(zip(tensors(row), tensors(row.to(CPU)), strict=True))
    assert all(torch.equal(there, here) and there.dtype == here.dtype for here, there in pairs)
    moves = {id(here): there for here, there in pairs if there is not here}
    assert len({there.untyped_storage().data_ptr() for there in moves.values()}) == 1
    assert all(there.data_ptr() % 16 == 0 for there in moves.values())
    # A tensor with two names moves once.
    places = [there.data_ptr() for there in moves.values() if there.numel()]
    assert len(set(places)) == len(places)


def test_what_the_host_reads_does_not_move() -> None:
    """From a row on the meta device, whose tensors have no values, recorded routing is written."""
    row = packed().to("meta")
    assert row.routing is not None
    row.routing.recorded[0] = torch.tensor([1, 2, 3, 0, 1])[:, None]
    found = collect_routing(
        [row.routing],
        BATCH.lengths,
        STEP,
        SHAPE,
        dp_rank=0,
        scope="all",
        groups=(),
        dp_group=RankOf(0, 1),
        device=CPU,
    )
    assert [value.flatten().tolist() for value in found if value is not None] == [[1, 2, 3], [0, 1]]


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


def test_a_host_copy_is_no_parameter_and_shares_no_memory() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    (found,) = host_copies([param])
    param.data.fill_(5.0)
    assert found.tolist() == [1.0, 1.0]
    assert not found.requires_grad
    assert not host_like(param).requires_grad
