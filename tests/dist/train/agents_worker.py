"""Runs examples/agents.py on a layout and saves the weights after its last step.

torchrun --nproc-per-node WORLD -m tests.dist.train.agents_worker OUT SETTINGS

SETTINGS are JSON: sizes of the layout, and what `train` and the policy get. Each rank draws the
first weights by their names, so that they do not depend on the layout.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout, Policy, launch
from tests.dist.spawn import ROOT
from tests.dist.train.documents_worker import MeasuredAdapter


class KeptAdapter(MeasuredAdapter):
    """Is found again after the example has ended."""

    num_pieces = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        KEPT.append((self, {name: param.detach().clone() for name, param in self._named()}))

    def step(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_pieces += plan.counts.num_pieces
        return super().step(plan, *args, **kwargs)

    def weights(self) -> dict[str, Any]:
        """Those that this rank has, by their names in the whole model."""
        return {name: param.detach().clone() for name, param in self._named()}


KEPT: list[tuple[KeptAdapter, dict[str, Any]]] = []


def load_example() -> Any:
    """The module of the example. It has a name, by which ranks send each other its classes."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("agents")


def main(out: str, text: str) -> None:
    """Train, and write first and last weights of the whole model, and the gradients' norms."""
    settings = json.loads(text)
    launch.start("cpu")
    example = load_example()
    example.ScheduleAdapter = KeptAdapter
    if "policy" in settings:
        settings["policy"] = Policy(**settings["policy"])
    example.train(Layout(**settings.pop("layout")), **settings)
    ((adapter, first),) = KEPT
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (first, adapter.weights()))
    if dist.get_rank() == 0:
        first, last = [{k: v for part in parts for k, v in part[n].items()} for n in range(2)]
        whole = {"first": first, "last": last, "norms": adapter.norms}
        torch.save(whole | {"pieces": adapter.num_pieces}, out)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
