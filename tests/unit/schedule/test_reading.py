"""Row shapes are read from a host's batches, which its step then gets again."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.utils import StragglerDetector

from megapack.schedule.reading import read_row_shapes

pytestmark = pytest.mark.unit


class Chunk(torch.nn.Module):
    """A model chunk that must not run while shapes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, input_ids: Any = None, extra: Any = None) -> Any:
        self.num_calls += 1
        return input_ids


class Wrapper(torch.nn.Module):
    """DDP, as hosts wrap their chunks."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def batches(*lengths: int) -> Iterator[dict[str, torch.Tensor]]:
    return iter([{"ids": torch.zeros(1, length, dtype=torch.long)} for length in lengths])


def step(iterator: Any, model: Any) -> Any:
    """A host's forward step, which takes its batch apart."""
    return model(input_ids=next(iterator).pop("ids"), extra=1), None


def read(step_func: Any, iterator: Any, chunk: Any, count: int, shards: int = 1) -> Any:
    return read_row_shapes(step_func, iterator, [chunk], count, sequence_shards=shards)


def test_the_step_gets_the_same_batches_after_reading() -> None:
    chunk = Chunk()
    shapes, iterator = read(step, batches(8, 6, 4), Wrapper(chunk), 2)
    assert shapes == [(8, 1), (6, 1)]
    assert chunk.num_calls == 0
    assert [step(iterator, chunk)[0].shape[1] for _ in range(3)] == [8, 6, 4]


def test_only_the_first_of_several_iterators_is_read() -> None:
    second = batches(8)
    _, iterators = read(step, [batches(8), second], Chunk(), 1)
    assert iterators[1] is second
    assert next(iterators[0])["ids"].shape == (1, 8)


def test_a_model_called_below_its_wrapper_is_left_as_well() -> None:
    chunk = Chunk()

    def below(iterator: Any, model: Any) -> Any:
        return model.module(next(iterator)["ids"]), None

    assert read(below, batches(12), Wrapper(chunk), 1, shards=2)[0] == [(6, 1)]
    assert chunk.num_calls == 0


def test_a_stage_without_an_embedding_reads_nothing() -> None:
    chunk = Chunk()
    chunk.pre_process = False  # type: ignore[assignment]
    own = batches(8)
    assert read(step, own, Wrapper(chunk), 1) == ([None], own)
    assert next(own)["ids"].shape == (1, 8)


@pytest.mark.parametrize(("pre_process", "shape"), [(True, (6, 1)), (False, None)])
def test_only_ids_of_an_embedding_give_lengths(
    pre_process: bool, shape: tuple[int, int] | None
) -> None:
    """Other stages may get ids of another shape."""
    chunk = Chunk()
    chunk.pre_process = pre_process  # type: ignore[assignment]

    def packing(iterator: Any, model: Any) -> Any:
        """Packs [2, 4] into [1, 6] where the model has an embedding, as SkyRL does."""
        ids = next(iterator)
        return model(ids.reshape(1, -1)[:, :6] if model.module.pre_process else ids), None

    shapes, iterator = read(packing, iter([torch.zeros(2, 4)]), Wrapper(chunk), 1)
    assert shapes == [shape]
    assert next(iterator).shape == (2, 4)


def test_an_object_with_its_own_position_keeps_it() -> None:
    class Batches:
        def __init__(self) -> None:
            self.offset = 0

        def get_next(self) -> Any:
            self.offset += 1
            return torch.zeros(2, 10 * self.offset, dtype=torch.long)

    own = Batches()
    shapes, iterator = read(lambda data, model: model(data.get_next()), own, Chunk(), 2)
    assert shapes == [(10, 2), (20, 2)]
    assert iterator is own
    assert own.offset == 0


def test_a_step_without_ids_gives_no_shape() -> None:
    embeddings = torch.zeros(1, 4, 8)
    assert read(lambda data, model: model(None), iter([1]), Chunk(), 1)[0] == [None]
    assert read(lambda data, model: model(embeddings), iter([1]), Chunk(), 1)[0] == [None]
    assert read(lambda data, model: (next(data), None), iter([1]), Chunk(), 1)[0] == [None]


def test_variables_that_a_step_sets_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE", "record")

    def replaying(iterator: Any, model: Any) -> Any:
        os.environ["STAGE"] = "replay"
        output = step(iterator, model)
        os.environ["STAGE"] = "record"
        return output

    read(replaying, batches(4), Chunk(), 1)
    assert os.environ["STAGE"] == "record"


def test_experts_that_a_step_notes_for_the_backward_are_noted_once() -> None:
    chunk = Chunk()
    replay = SimpleNamespace(target=None, backward=["earlier"])
    chunk.router_replay = replay  # type: ignore[assignment]

    def replaying(iterator: Any, model: Any) -> Any:
        replay.target = "experts"
        replay.backward.append("experts")
        return step(iterator, model)

    _, iterator = read(replaying, batches(4), Wrapper(chunk), 1)
    assert (replay.target, replay.backward) == (None, ["earlier"])
    replaying(iterator, chunk)
    assert replay.backward == ["earlier", "experts"]


def test_a_reference_model_does_not_run_for_a_length() -> None:
    reference = Chunk()
    reference.pre_process = True  # type: ignore[assignment]

    def with_reference(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        reference(batch["ids"])
        return model(batch["ids"]), None

    assert read(with_reference, batches(4), Chunk(), 1)[0] == [None]
    assert reference.num_calls == 0


def test_megatrons_straggler_detector_does_not_log_the_reading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def timed(iterator: Any, model: Any) -> Any:
        with StragglerDetector():
            return step(iterator, model)

    assert read(timed, batches(4), Chunk(), 1)[0] == [(4, 1)]
    assert not caplog.records


def test_a_replayed_iterator_can_be_copied() -> None:
    _, iterator = read(step, batches(4), Chunk(), 1)
    assert next(copy.copy(iterator))["ids"].shape == (1, 4)


def test_an_error_of_the_step_is_not_hidden_and_hooks_are_gone() -> None:
    chunk = Chunk()
    with pytest.raises(StopIteration):
        read(step, batches(4), chunk, 2)
    chunk(None)
    assert chunk.num_calls == 1


def test_an_iterator_keeps_its_other_attributes() -> None:
    class Loader:
        name = "loader"

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return {"ids": torch.zeros(1, 4, dtype=torch.long)}

    assert read(step, Loader(), Chunk(), 1)[1].name == "loader"


def test_state_that_a_step_sets_is_restored_by_what_keeps_it() -> None:
    """The stage of a replay, which a step sets before the model and resets after it."""
    stage = {"name": "backward"}

    @contextlib.contextmanager
    def keeping() -> Iterator[None]:
        before = dict(stage)
        yield
        stage.update(before)

    def replaying(iterator: Any, model: Any) -> Any:
        stage["name"] = "forward"
        return step(iterator, model)

    read_row_shapes(replaying, batches(4), [Chunk()], 1, sequence_shards=1, keeping=keeping)
    assert stage == {"name": "backward"}
    read_row_shapes(replaying, batches(4), [Chunk()], 1, sequence_shards=1)
    assert stage == {"name": "forward"}


def test_samples_in_a_nested_tensor_are_not_taken_for_a_row() -> None:
    # verl's later stages: the first one, which packs, knows the length of the row.
    samples = [torch.zeros(5, dtype=torch.long), torch.zeros(3, dtype=torch.long)]
    nested = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    assert read(step, iter([{"ids": nested}]), Chunk(), 1)[0] == [None]


def test_padded_samples_that_the_model_packs_have_their_rows_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """verl gives models with images the samples [3, 9] of a row of 20 tokens, over two GPUs."""
    monkeypatch.setattr("megapack.schedule.reading.cp_size", lambda: 2)

    class Packing(Chunk):
        def forward(self, input_ids: Any = None, packed_seq_params: Any = None) -> Any:
            raise AssertionError("it must not run")

    def padded(iterator: Any, model: Any) -> Any:
        bounds = torch.tensor([0, 8, 16, 20])
        params = SimpleNamespace(cu_seqlens_q_padded=bounds)
        return model(torch.zeros(3, 9, dtype=torch.long), packed_seq_params=params), None

    assert read(padded, batches(1), Packing(), 1)[0] == [(10, 1)]
    assert read(padded, batches(1), Packing(), 1, shards=2)[0] == [(5, 1)]
