"""Signals are recorded inside the context and handled as before outside of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from megapack.errors import RunInterrupted
from megapack.ranks.interrupt import SIGNALS, Interrupt, StoppedEarlyError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_recorded(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt(saves=True) as interrupt:
        interrupt.begin()
        assert not interrupt.noted
        signal.raise_signal(number)
        # A rank may get it twice: from the scheduler, and passed on by the launcher.
        signal.raise_signal(number)
        assert interrupt.noted
        assert interrupt.ends_with is None
        interrupt.begin()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_first_step_ends_the_rank_at_once(number: signal.Signals) -> None:
    with Interrupt(saves=True) as interrupt:
        assert interrupt.ends_with == RunInterrupted.exit_code
        with pytest.raises(KeyboardInterrupt, match="before its first step, with nothing to save"):
            signal.raise_signal(number)
        # The second one must not disturb the end; and the first one's error may have been lost.
        signal.raise_signal(number)
        with pytest.raises(StoppedEarlyError):
            interrupt.begin()


ENDS = """
import signal
from megapack.ranks.interrupt import Interrupt
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
with Interrupt(saves=False):
    signal.raise_signal(signal.{})
print("went on")
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_ignored_signals_end_a_run_without_checkpoints(
    number: signal.Signals,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(number.name)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -number
    assert done.stdout == b""


def test_a_watchdog_gets_a_byte_per_signal() -> None:
    with Interrupt(saves=True) as interrupt:
        interrupt.begin()
        assert interrupt.bytes is not None
        signal.raise_signal(signal.SIGTERM)
        interrupt.bytes.settimeout(5)
        assert signal.SIGTERM in interrupt.bytes.recv(8)
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_is_not_changed() -> None:
    # A background job of a script starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupt(saves=True):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_than_the_main_one_get_no_signals() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupt(saves=True) as interrupt:
                assert not interrupt.noted
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
