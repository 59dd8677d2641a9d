"""The forward step of a chunk: what listeners hear, and zeros after memory has run out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack import Layout, MicroBatch
from megapack.model.experts.rows import SchedulePass
from megapack.rows.packed import PackedRow, pack_row
from megapack.samples import SampleBatch
from megapack.schedule.faults import OutOfMemoryGuard
from megapack.schedule.forward import ForwardStep, Kind, Listener, LossReport

pytestmark = pytest.mark.unit


class Notes(Listener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.heard.append(f"({kind}{chunk}.{microbatch}")

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.heard.append(f"{kind}{chunk}.{microbatch})")

    def on_output(self, chunk: int, microbatch: int, output: Tensor) -> None:
        self.heard.append(f"[{tuple(output.shape)}]")


class Chunk(torch.nn.Module):
    """One embedding, called like a GPT chunk; the last one has an output layer."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.post_process = is_last
        self.pre_process = True
        self.embedding = torch.nn.Embedding(10, 2)
        self.output_layer = torch.nn.Linear(2, 10, bias=False) if is_last else None
        self.config = SimpleNamespace(
            hidden_size=2, pipeline_dtype=None, params_dtype=torch.float32
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None,
        packed_seq_params: Any,
    ) -> Tensor:
        hidden: Tensor = self.embedding(input_ids).transpose(0, 1)
        return hidden if self.output_layer is None else self.output_layer(hidden)[0]


def chunks(num: int, *, is_last: bool = True) -> list[torch.nn.Module]:
    return [Chunk(is_last=is_last and i == num - 1) for i in range(num)]


def loss(row: PackedRow, head: Any, hidden: Tensor) -> LossReport:
    return hidden.sum(), torch.zeros(()), {"a": hidden}


def make(modules: list[torch.nn.Module], *listeners: Any, **options: Any) -> ForwardStep:
    return ForwardStep(modules, loss, SchedulePass(), listeners=listeners, **options)


def rows(num: int) -> Iterator[PackedRow]:
    micro_batch = MicroBatch((0,), row_tokens=3, tokens=3, tokens_sq=9, padded_tokens=3)
    return iter([pack_row(SampleBatch([[5, 6, 7]]), micro_batch, Layout())] * num)


def test_a_stage_in_the_middle() -> None:
    modules, notes = chunks(1, is_last=False), Notes()
    forward, inputs = make(modules, notes), rows(2)
    first, loss_function = forward(inputs, modules[0])
    second, _ = forward(inputs, modules[0])
    assert loss_function is None
    first.backward(torch.ones(3, 1, 2))
    second.backward(torch.ones(3, 1, 2))
    assert notes.heard == [
        *("(F0.0", "[(3, 1, 2)]", "F0.0)", "(F0.1", "[(3, 1, 2)]", "F0.1)"),
        *("(B0.0", "B0.0)", "(B0.1", "B0.1)"),
    ]


def test_the_loss_ends_the_forward_of_the_last_chunk() -> None:
    modules, notes = chunks(1), Notes()
    output, loss_function = make(modules, notes)(rows(1), modules[0])
    assert notes.heard == ["(F0.0"]
    assert loss_function is not None
    total, _, report = loss_function(output)
    assert report["a"] is output
    total.backward()
    assert notes.heard == ["(F0.0", "[()]", "F0.0)", "(B0.0", "B0.0)"]


def test_the_backward_ends_after_its_gradients_are_there() -> None:
    (module,) = modules = chunks(1, is_last=False)

    class Looks(Notes):
        def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
            weight = next(module.parameters())
            assert (weight.grad is not None) == (kind == "B")
            super().on_end(kind, chunk, microbatch)

    notes = Looks()
    output, _ = make(modules, notes)(rows(1), modules[0])
    output.backward(torch.ones(3, 1, 2))
    assert notes.heard[-2:] == ["(B0.0", "B0.0)"]


def test_micro_batches_count_per_chunk() -> None:
    modules, notes = chunks(2, is_last=False), Notes()
    forward = make(modules, notes)
    of_first, of_second = rows(2), rows(2)
    for module, inputs in [(0, of_first), (0, of_first), (1, of_second), (1, of_second)]:
        forward(inputs, modules[module])
    begun = [text for text in notes.heard if text.startswith("(")]
    assert begun == ["(F0.0", "(F0.1", "(F1.0", "(F1.1"]


def test_a_pass_without_gradients_has_no_backward() -> None:
    modules, notes = chunks(1, is_last=False), Notes()
    with torch.no_grad():
        make(modules, notes)(rows(1), modules[0])
    assert notes.heard == ["(F0.0", "[(3, 1, 2)]", "F0.0)"]


def test_every_listener_hears_and_may_raise() -> None:
    class Refuses(Notes):
        def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
            super().on_begin(kind, chunk, microbatch)
            if kind == "B":
                raise ValueError("no backward")

    modules, notes, refuses = chunks(1, is_last=False), Notes(), Refuses()
    output, _ = make(modules, notes, refuses)(rows(1), modules[0])
    with pytest.raises(ValueError, match="no backward"):
        output.backward(torch.ones(3, 1, 2))
    assert notes.heard == refuses.heard == ["(F0.0", "[(3, 1, 2)]", "F0.0)", "(B0.0"]


def test_memory_that_runs_out_gives_zeros_of_the_same_shape_and_ends_the_work() -> None:
    modules = chunks(1)
    memory, notes = OutOfMemoryGuard(torch.device("cpu")), Notes()
    forward, inputs = make(modules, notes, attempt=memory.attempt), rows(3)
    whole, loss_function = forward(inputs, modules[0])
    assert loss_function is not None
    modules[0].forward = _out_of_memory  # type: ignore[method-assign]
    zeros, no_loss = forward(inputs, modules[0])
    assert no_loss is not None
    assert zeros.shape == whole.shape
    assert not zeros.any()
    total, num_tokens, _ = no_loss(zeros)
    total.backward()
    assert total == num_tokens == 0
    assert zeros.grad is not None
    assert not zeros.grad.any()
    # The loss of the row before is not computed any more.
    assert loss_function(whole)[0] == 0
    assert notes.heard == ["(F0.0", "(F0.1"]
    assert memory.agree()


def _out_of_memory(**_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")
