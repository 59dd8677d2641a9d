"""Planned shapes: which micro-batch each receive belongs to, per stage and chunk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megapack.errors import ConfigError, ScheduleError
from megapack.schedule.p2p import PlannedP2PCommunicator, receive_order, width_between_stages
from tests.groups import RankOf

pytestmark = pytest.mark.unit

HIDDEN = 16
NOTHING = [0, 0, 0]


@pytest.fixture(autouse=True)
def _global_ranks_are_group_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_global_rank", lambda group, rank: rank)


def communicator(
    rank: int,
    size: int,
    lengths: list[int],
    *,
    vpp: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
) -> PlannedP2PCommunicator:
    config = SimpleNamespace(
        hidden_size=HIDDEN, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
    )
    return PlannedP2PCommunicator(
        RankOf(rank, size),
        config,
        row_shapes=[(length, 1) for length in lengths],
        vpp=vpp,
        group_size=group_size,
        forward_only=forward_only,
    )


def activations(stage: PlannedP2PCommunicator, count: int) -> list[int]:
    """Row lengths of the next receives from the previous stage."""
    return [_length(*stage._communicate_shapes(None, None, True, False)) for _ in range(count)]


def gradients(stage: PlannedP2PCommunicator, count: int) -> list[int]:
    """Row lengths of the next receives from the next stage."""
    return [
        _length(*stage._communicate_shapes(None, None, False, True)[::-1]) for _ in range(count)
    ]


def _length(wanted: list[int], other: list[int]) -> int:
    assert other == NOTHING
    assert wanted[1:] == [1, HIDDEN]
    return wanted[0]


def test_interleaving_runs_g_micro_batches_per_chunk_turn() -> None:
    assert receive_order(4, 2, 2) == [
        (0, 0), (1, 0), (0, 1), (1, 1),
        (2, 0), (3, 0), (2, 1), (3, 1),
    ]  # fmt: skip


def test_the_last_turn_of_each_chunk_may_be_shorter() -> None:
    assert receive_order(5, 2, 3) == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1),
        (3, 0), (4, 0), (3, 1), (4, 1),
    ]  # fmt: skip


def test_interleaving_without_a_group_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"vpp=2 .*set Layout.microbatch_group_size"):
        receive_order(4, 2, None)


def test_interleaved_stages_wrap_round() -> None:
    lengths = [10, 20, 30, 40, 50]
    in_groups = [10, 20, 30, 10, 20, 30, 40, 50, 40, 50]
    first, last = (communicator(rank, 2, lengths, vpp=2, group_size=3) for rank in range(2))
    # The first stage's chunk 0 reads tokens; its chunk 1 receives the output of the last stage's
    # chunk 0.
    assert activations(first, 5) == lengths
    assert gradients(first, 10) == in_groups
    assert activations(last, 10) == in_groups
    # The last stage's last chunk has the loss; its chunk 0 receives gradients of the first stage.
    assert gradients(last, 5) == lengths
    assert first.num_pending == last.num_pending == 0


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_next_stage_expects_what_a_stage_sends(rank: int) -> None:
    """Chunk by chunk: activations arrive in the order in which the sender runs that chunk."""
    lengths = [7, 1, 5, 9, 2, 8]
    size = 4
    vpp = 2
    group_size = 4
    order = receive_order(len(lengths), vpp, group_size)
    receiver = (rank + 1) % size
    sent = [lengths[m] for m, chunk in order if not (rank == size - 1 and chunk == vpp - 1)]
    stage = communicator(receiver, size, lengths, vpp=vpp, group_size=group_size)
    assert activations(stage, len(sent)) == sent


@pytest.mark.parametrize(
    ("settings", "streams"),
    [
        ({"enable_mhc_connections": True, "mhc_num_residual_streams": 3}, 3),
        ({"enable_mhc_connections": False, "mhc_num_residual_streams": 3}, 1),
        ({"enable_hyper_connections": True, "num_residual_streams": 4}, 4),
        ({"enable_hyper_connections": False, "num_residual_streams": 4}, 1),
    ],
)
def test_stages_exchange_all_streams_of_hyper_connections(
    settings: dict[str, int], streams: int
) -> None:
    stage = communicator(1, 2, [10])
    vars(stage.config).update(settings)
    assert stage._communicate_shapes(None, None, True, False)[0] == [10, 1, streams * HIDDEN]
    assert width_between_stages(stage.config) == streams * HIDDEN


def test_forward_only_expects_no_gradients() -> None:
    stage = communicator(0, 2, [10, 20], vpp=2, group_size=2, forward_only=True)
    assert stage.num_pending == 2
    assert activations(stage, 2) == [10, 20]
    with pytest.raises(ScheduleError, match="one more gradient"):
        gradients(stage, 1)


def test_one_receive_too_many_is_an_error() -> None:
    stage = communicator(1, 2, [10, 20])
    activations(stage, 2)
    with pytest.raises(ScheduleError, match="one more activation than the plan's 2 micro-batches"):
        activations(stage, 1)
