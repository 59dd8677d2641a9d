"""Signals are noted inside the context, and handled as before outside of it."""

from __future__ import annotations

import signal
import threading

import pytest

from megapack.interrupt import SIGNALS, Interrupt

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt(saves=True) as interrupt:
        assert not interrupt.noted
        signal.raise_signal(number)
        # A scheduler may send it to the rank and the launcher may pass it on.
        signal.raise_signal(number)
        assert interrupt.noted
    assert signal.getsignal(number) is before


def test_handlers_come_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ValueError, match="bad"), Interrupt(saves=True):
        raise ValueError("bad")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signals_end_a_run_without_checkpoints_even_if_they_were_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Interrupt(saves=False):
            assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * 2
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_stays_as_it_is() -> None:
    # A job in the background of a script is started with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupt(saves=True):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
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
