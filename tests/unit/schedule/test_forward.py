"""The forward step of a chunk, and its calls of listeners."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megapack import Layout, MicroBatch
from megapack.job.gpt.build import without_cuda_graphs
from megapack.model.head import deferred_head
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.rows.schedule_pass import SchedulePass
from megapack.samples import SampleBatch
from megapack.schedule.forward import ForwardStep, LossReport, PassContext
from megapack.schedule.listeners import Kind, Listener
from tests.groups import RankOf

pytestmark = pytest.mark.unit


class Recorder(Listener):
    """Records its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.events.append(f"({kind}{chunk}.{microbatch}")

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self.events.append(f"{kind}{chunk}.{microbatch})")

    def on_output(self, chunk: int, microbatch: int, output: Tensor) -> None:
        self.events.append(f"[{tuple(output.shape)}]")


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


def loss(row: PlacedRow, head: Any, hidden: Tensor) -> LossReport:
    return hidden.sum(), torch.zeros(()), {"a": hidden}


def make(modules: list[torch.nn.Module], *listeners: Any) -> ForwardStep:
    context = PassContext(schedule_pass=SchedulePass(), listeners=listeners)
    return ForwardStep(modules, loss, context)


def rows(num: int) -> Iterator[tuple[int, PlacedRow]]:
    """Micro-batches of one row, as Megatron's schedule gives them to the forward step."""
    micro_batch = MicroBatch((0,), row_tokens=3, tokens=3, tokens_sq=9, padded_tokens=3)
    row = pack_row(SampleBatch([[5, 6, 7]]), micro_batch, Layout())
    return enumerate([PlacedRow.of(row, params=None)] * num)


def test_listeners_of_a_middle_stage() -> None:
    modules = chunks(1, is_last=False)
    recorder = Recorder()
    forward = make(modules, recorder)
    inputs = rows(2)
    first, loss_function = forward(inputs, modules[0])
    second, _ = forward(inputs, modules[0])
    assert loss_function is None
    first.backward(torch.ones(3, 1, 2))
    second.backward(torch.ones(3, 1, 2))
    assert recorder.events == [
        *("(F0.0", "[(3, 1, 2)]", "F0.0)", "(F0.1", "[(3, 1, 2)]", "F0.1)"),
        *("(B0.0", "B0.0)", "(B0.1", "B0.1)"),
    ]


def test_the_loss_ends_the_forward_of_the_last_chunk() -> None:
    modules = chunks(1)
    recorder = Recorder()
    output, loss_function = make(modules, recorder)(rows(1), modules[0])
    assert recorder.events == ["(F0.0"]
    assert loss_function is not None
    total, _, report = loss_function(output)
    assert report["a"] is output
    total.backward()
    assert recorder.events == ["(F0.0", "[()]", "F0.0)", "(B0.0", "B0.0)"]


def test_micro_batches_come_with_their_numbers() -> None:
    modules = chunks(2, is_last=False)
    recorder = Recorder()
    forward = make(modules, recorder)
    first, second = rows(2)
    for row, module in [(second, 0), (first, 0), (first, 1)]:
        forward(iter([row]), modules[module])
    begun = [text for text in recorder.events if text.startswith("(")]
    assert begun == ["(F0.1", "(F0.0", "(F1.0"]


def test_every_listener_is_called_and_may_raise() -> None:
    class Refusing(Recorder):
        def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
            super().on_begin(kind, chunk, microbatch)
            if kind == "B":
                raise ValueError("no backward")

    modules = chunks(1, is_last=False)
    recorder = Recorder()
    refusing = Refusing()
    output, _ = make(modules, recorder, refusing)(rows(1), modules[0])
    with pytest.raises(ValueError, match="no backward"):
        output.backward(torch.ones(3, 1, 2))
    assert recorder.events == refusing.events == ["(F0.0", "[(3, 1, 2)]", "F0.0)", "(B0.0"]


def test_hidden_states_of_a_bf16_model_stay_bf16() -> None:
    """Float16Module would widen the last chunk's output, and the gather moves twice the bytes."""
    module = chunks(1)[0]
    module.pg_collection = SimpleNamespace(pp=RankOf(0, 1))  # type: ignore[assignment]
    sizes = {"num_layers": 1, "hidden_size": 2, "num_attention_heads": 1}
    config = TransformerConfig(**sizes, bf16=True, **without_cuda_graphs())
    wrapped = Float16Module(config, module)
    ((_, row),) = rows(1)
    hidden, head = make([wrapped]).run_row(row, wrapped)
    assert head is not None
    assert hidden.dtype == torch.bfloat16
    inputs = {"position_ids": None, "attention_mask": None, "packed_seq_params": None}
    with deferred_head(wrapped):
        assert wrapped(row.tokens_T[None], **inputs).dtype == torch.float32
