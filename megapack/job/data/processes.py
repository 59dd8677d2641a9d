"""A process that answers messages one by one; both sides pickle them over pipes.

    process = AnsweringProcess("from megapack.job.data.workers import serve; serve()")
    process.send(message)
    answer = process.receive()

A process is started, not forked: the job that reads the data has threads and perhaps a GPU.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from megapack.base.processes import python_command


class ProcessEnded(Exception):
    """The process has ended, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class AnsweringProcess:
    """The process and its pipes.

    Args:
        code: what it runs; that calls `answer_messages`.
        environment: variables that it gets in addition.
    """

    def __init__(self, code: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            python_command(code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def send(self, message: Any) -> None:
        """Send a message; raises ProcessEnded."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            pickle.dump(message, stdin, protocol=5)
            stdin.flush()
        except OSError:
            raise ProcessEnded(self._process.wait()) from None

    def receive(self) -> Any:
        """The answer to the oldest message that has none; raises the error of its work.

        Raises:
            ProcessEnded: there will be no answer.
        """
        stdout = self._process.stdout
        assert stdout is not None
        try:
            answer = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise ProcessEnded(self._process.wait()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def answer_messages(work: Callable[[Any], Any]) -> None:
    """In the process: answer messages until the input ends; an error is the answer too."""
    # Ctrl-C reaches this process too; the parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    # What a library prints must not come between the answers.
    os.dup2(2, 1)
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = work(message)
        except Exception as error:  # raised in the parent
            answer = error
        pickle.dump(answer, out, protocol=5)
        out.flush()
