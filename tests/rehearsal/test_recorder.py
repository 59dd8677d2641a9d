"""What is noted where NCCL and a GPU behave otherwise than gloo and a CPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rehearsal.notes import RANK_FILE, waited
from tests.rehearsal.recorder import _fault, _Recorder

pytestmark = pytest.mark.unit


class Work:
    """A handle that can be waited for."""


def test_a_batch_that_has_one_handle_is_waited_for_by_it(tmp_path: Path) -> None:
    recorder = _Recorder(tmp_path / RANK_FILE.format(0), 0)
    work = Work()
    batch = recorder.batching(lambda operations: [work, None])
    wait = recorder.waiting(lambda work: None)
    batch([])
    batch([])
    wait(work)
    # The second launch has the same handle, which stays that of the first.
    assert (tmp_path / RANK_FILE.format(0)).read_bytes() == waited(1)


def fault_of_thread(target: Any) -> str:
    """What is said of an operation in a thread that runs a function with `_fault` in it."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: target(said), name="other")
    thread.start()
    thread.join()
    return said[0]


def ask(said: list[str]) -> None:
    """Note what is said of an all-reduce."""
    said.append(_fault("allreduce", "all_reduce", [[torch.ones(2)]]))


def test_other_threads_have_no_order() -> None:
    assert fault_of_thread(ask) == "order between threads (this is other)"


def test_a_backward_has_the_order_of_the_thread_that_waits_for_it() -> None:
    def backward(said: list[str]) -> None:
        value = torch.ones(2, requires_grad=True)
        value.register_hook(lambda grad: ask(said))
        value.sum().backward()

    assert fault_of_thread(backward) == ""
