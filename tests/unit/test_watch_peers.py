"""Ranks of other hosts are known by their beats, each by the rank before it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megapack import watch_peers as module
from megapack.board import Board
from megapack.watch_peers import Peers
from tests.job_in_process import Clock

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Four ranks, two on each of two hosts."""
    store = dist.HashStore()
    boards = []
    for rank in range(4):
        monkeypatch.setattr(os, "readlink", lambda path, host=rank // 2: f"pid:[{host}]")
        boards.append(Board(store, rank, 4))
    yield boards
    for board in boards:
        board.close()


def test_a_rank_that_shows_no_sign_of_life_is_named(
    hosts: list[Board], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers(hosts[1])
    assert peers.look(in_step=True) == {}
    clock.now += 14
    assert peers.look(in_step=True) == peers.silent == {}
    clock.now += 2
    assert peers.look(in_step=True) == {}
    assert peers.silent == {2: "rank 2 shows no sign of life since 16 s"}
    clock.now += 10
    peers.look(in_step=True)
    assert peers.silent == {2: "rank 2 shows no sign of life since 26 s"}
    assert caplog.messages == ["rank 2 shows no sign of life since 16 s"]
    hosts[2].beat()
    peers.look(in_step=True)
    assert peers.silent == {}


def test_a_rank_that_left_need_show_none(hosts: list[Board], clock: Clock) -> None:
    peers = Peers(hosts[3])
    peers.look(in_step=True)
    hosts[0].leave()
    clock.now += 60
    peers.look(in_step=True)
    assert peers.silent == {}


def test_of_the_same_host_beats_are_not_asked_for(hosts: list[Board], clock: Clock) -> None:
    """Its process is looked up: one that compiles for a minute is no news."""
    peers = Peers(hosts[0])
    peers.look(in_step=True)
    clock.now += 60
    peers.look(in_step=True)
    assert peers.silent == {}


def test_a_rank_alone_has_no_peers() -> None:
    assert Peers(None).look(in_step=True) == Peers(None).ended() == {}
