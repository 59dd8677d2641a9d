"""Faults of NCCL's, put into this rank's operations by a rehearsal.

The variable's value is `hang`, `die`, or `refuse`: rank 1 never comes back from an operation, is
killed in it, or every rank gets the error with which NCCL refuses ranks that share a GPU.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistBackendError, ProcessGroup

from tests.rehearsal.recorder import METHODS

FAULT = "MEGAPACK_CHECK_FAULT"
KINDS = ("refuse", "hang", "die")
REFUSAL = "NCCL error: invalid usage: Duplicate GPU detected : rank 1 and rank 0"
# Operations of a rank before the fault: it has begun its work by then.
_AFTER = 12


def install(kind: str) -> None:
    """Put the fault into this process, for the rest of its life; "" for none."""
    if kind == "refuse" or (kind and os.environ["RANK"] == "1"):
        fault = _Fault(kind)
        for method in METHODS:
            if original := getattr(ProcessGroup, method, None):
                setattr(ProcessGroup, method, fault.before(original))


class _Fault:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._left = 0 if kind == "refuse" else _AFTER

    def before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            # Agreements and the watchdog have threads, and groups over gloo.
            if threading.current_thread() is threading.main_thread():
                self._strike()
            return original(*args, **kwargs)

        return operation

    def _strike(self) -> None:
        if self._left:
            self._left -= 1
        elif self._kind == "refuse":
            raise DistBackendError(REFUSAL)
        elif self._kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            while True:
                time.sleep(1)
