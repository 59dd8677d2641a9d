"""Listeners hear each forward and backward begin and end; here with one linear layer a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.microbatch_events import HeardForward, Kind, Listener

pytestmark = pytest.mark.unit


class Notes(Listener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.heard.append(f"({kind}{chunk}.{microbatch}")

    def ends(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.heard.append(f"{kind}{chunk}.{microbatch})")

    def puts_out(self, chunk: int, microbatch: int, output: Tensor) -> None:
        self.heard.append(f"[{tuple(output.shape)}]")


def chunks(num: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(2, 2, bias=False) for _ in range(num)]


def make(modules: list[torch.nn.Module], *listeners: Any, is_last: bool = True) -> HeardForward:
    def forward(rows: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        output = model(next(rows))
        if not (is_last and model is modules[-1]):
            return output, None
        return output, lambda hidden: (hidden.sum(), 3, {"a": 1})

    return HeardForward(forward, modules, listeners)


def rows(num: int) -> Iterator[Any]:
    return iter([torch.ones(1, 2)] * num)


def test_a_stage_in_the_middle() -> None:
    modules, notes = chunks(1), Notes()
    forward, inputs = make(modules, notes, is_last=False), rows(2)
    first, loss_function = forward(inputs, modules[0])
    second, _ = forward(inputs, modules[0])
    assert loss_function is None
    first.backward(torch.ones(1, 2))
    second.backward(torch.ones(1, 2))
    assert notes.heard == [
        *("(F0.0", "[(1, 2)]", "F0.0)", "(F0.1", "[(1, 2)]", "F0.1)"),
        *("(B0.0", "B0.0)", "(B0.1", "B0.1)"),
    ]


def test_the_loss_ends_the_forward_of_the_last_chunk() -> None:
    modules, notes = chunks(1), Notes()
    output, loss_function = make(modules, notes)(rows(1), modules[0])
    assert notes.heard == ["(F0.0"]
    assert loss_function is not None
    loss, *others = loss_function(output)
    assert others == [3, {"a": 1}]
    loss.backward()
    assert notes.heard == ["(F0.0", "[()]", "F0.0)", "(B0.0", "B0.0)"]


def test_the_backward_ends_after_its_gradients_are_there() -> None:
    modules = chunks(1)

    class Looks(Notes):
        def ends(self, kind: Kind, chunk: int, microbatch: int) -> None:
            weight = modules[0].weight
            assert (weight.grad is not None) == (kind == "B")
            super().ends(kind, chunk, microbatch)

    notes = Looks()
    output, _ = make(modules, notes, is_last=False)(rows(1), modules[0])
    output.backward(torch.ones(1, 2))
    assert notes.heard[-2:] == ["(B0.0", "B0.0)"]


def test_micro_batches_count_per_chunk() -> None:
    modules, notes = chunks(2), Notes()
    forward = make(modules, notes, is_last=False)
    of_first, of_second = rows(2), rows(2)
    for module, inputs in [(0, of_first), (0, of_first), (1, of_second), (1, of_second)]:
        forward(inputs, modules[module])
    begun = [text for text in notes.heard if text.startswith("(")]
    assert begun == ["(F0.0", "(F0.1", "(F1.0", "(F1.1"]


def test_a_pass_without_gradients_has_no_backward() -> None:
    modules, notes = chunks(1), Notes()
    with torch.no_grad():
        make(modules, notes, is_last=False)(rows(1), modules[0])
    assert notes.heard == ["(F0.0", "[(1, 2)]", "F0.0)"]


def test_every_listener_hears_and_may_raise() -> None:
    class Refuses(Notes):
        def begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
            super().begins(kind, chunk, microbatch)
            if kind == "B":
                raise ValueError("no backward")

    modules, notes, refuses = chunks(1), Notes(), Refuses()
    output, _ = make(modules, notes, refuses, is_last=False)(rows(1), modules[0])
    with pytest.raises(ValueError, match="no backward"):
        output.backward(torch.ones(1, 2))
    assert notes.heard == refuses.heard == ["(F0.0", "[(1, 2)]", "F0.0)", "(B0.0"]
