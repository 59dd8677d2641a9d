"""Runs cases with samples in pieces of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.rows.split_worker CASES_MODULE REFERENCE OUT CASE ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapack.model.attention import carried
from megapack.model.attention.packed import row_params
from megapack.plan import Plan
from megapack.rows.chain import Link
from megapack.rows.packed import PackedRow
from megapack.schedule import chains, runner
from tests.dist.rows.row_problem import Samples
from tests.dist.rows.row_worker import main
from tests.dist.rows.split_problem import SplitCase
from tests.dist.rows.wide_worker import WideRun

_FIND_GRADIENTS = chains.ChainLosses._find_gradients


def _without_a_piece(self: chains.ChainLosses, forwards: Sequence[Any]) -> Tensor:
    """The chain's loss, whose second piece gets no gradients."""
    loss = _FIND_GRADIENTS(self, forwards)
    forwards[1].gradients = [torch.zeros_like(x) for x in forwards[1].gradients]
    return loss


def _without_earlier_pieces(row: PackedRow, group: Any, link: Link | None) -> Any:
    return row_params(replace(row, piece=None), group)


_MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no carried gradients": (carried, "_with_leaf", lambda grad, leaf: grad),
    "no carried keys": (runner, "row_params", _without_earlier_pieces),
    "no losses of a piece": (chains.ChainLosses, "_find_gradients", _without_a_piece),
}


class SplitRun(WideRun):
    """A model of a case with samples in pieces, whose steps have orders."""

    def step(self, plan: Plan, samples: Samples, kind: str) -> Any:
        assert isinstance(self.case, SplitCase)
        if not self.case.mutation:
            return super().step(plan, samples, kind)
        with mock.patch.object(*_MUTATIONS[self.case.mutation]):
            return super().step(plan, samples, kind)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:], SplitRun)
