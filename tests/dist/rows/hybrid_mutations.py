"""What mutated cases of hybrid models do wrong; each is in the gated delta nets alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapack.model.carried import earlier, leave
from megapack.model.recurrent import gated_delta, scan, segments
from megapack.model.recurrent.heads import HeadExchange
from megapack.schedule import runner

_CONVOLUTION = segments._convolution


def _without_tails(row: segments.Segments, width: int) -> Any:
    return _CONVOLUTION(dataclasses.replace(row, parents=[-1] * len(row.parents)), width)


def _scanning(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`scan_row`, of which segments begin with changed states."""

    def scan_row(kernel: scan.ScanKernel, *args: Any) -> Any:
        def changed(inputs: Any, level: Any, initial: Tensor | None) -> Any:
            return kernel(inputs, level, None if initial is None else change(initial))

        return scan.scan_row(changed, *args)

    return scan_row


def _zeros_of_earlier(link: Any, layer: Any) -> Any:
    return [tuple(map(torch.zeros_like, left)) for left in earlier(link, layer)]


def _leave_detached(link: Any, layer: Any, out: Tensor, values: Any) -> Tensor:
    return leave(link, layer, out, tuple(v if v is None else v.detach() for v in values))


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no tails of paths": (segments, "_convolution", _without_tails),
    "no states of paths": (gated_delta, "scan_row", _scanning(torch.zeros_like)),
    "no gradients through states": (gated_delta, "scan_row", _scanning(Tensor.detach)),
    "no carried states": (gated_delta, "earlier", _zeros_of_earlier),
    "no gradients of carried states": (gated_delta, "leave", _leave_detached),
    "no driven layers": (runner, "driving", lambda chunks: contextlib.nullcontext()),
    "no exchanged heads": (HeadExchange, "_exchanged", lambda self, sent: sent),
}
