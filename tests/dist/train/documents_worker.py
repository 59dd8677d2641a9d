"""Runs the Python blocks of a document on four ranks, with the names that its text assumes.

torchrun --nproc-per-node 4 -m tests.dist.train.documents_worker DOCUMENT LAYOUT

LAYOUT takes the place of the document's, such as "Layout(dp=4)". Each rank draws the weights by
their names, so that they do not depend on it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megapack import Layout, launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.model.parameters import global_parameters
from megapack.schedule import ScheduleAdapter
from tests.dist.setup import build_chunks
from tests.documents import python_blocks

_LAYOUT = re.compile(r"Layout\(dp=2[^)]*\)")


class MeasuredAdapter(ScheduleAdapter):
    """Notes the norm of the whole model's gradient after each step."""

    norms: ClassVar[list[float]] = []

    def __init__(self, model: Sequence[Any], **settings: Any) -> None:
        super().__init__(model, **settings)
        for name, param in self._named():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(param.shape, generator=generator)
            param.data.copy_(0.05 * drawn + ("norm" in name and param.ndim == 1))

    def _named(self) -> list[tuple[str, Any]]:
        """Parameters by their names in the whole model, those of a tower too."""
        towers = self.modules[len(self.chunks) :]
        named = [pair for chunk in self.chunks for pair in global_parameters(chunk)]
        return named + [pair for tower in towers for pair in tower.module.named_parameters()]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """A step, and the norm of its gradient: each parameter counts once, whoever has it."""
        result = super().step(*args, **kwargs)
        own = {
            name: float(param.main_grad.double().square().sum()) for name, param in self._named()
        }
        squares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(squares, own)
        self.norms.append(
            math.sqrt(sum({k: v for part in squares for k, v in part.items()}.values()))
        )
        return result


def given(layout: Layout) -> dict[str, Any]:
    """What a user's own loop defines: a model on its layout, an optimizer, and rollouts."""
    chunks = build_chunks(layout)
    prompts = [[1 + i % 5] * (1 + 3 * i % 7) for i in range(12)]
    responses = [[2 + i % 3] * (1 + 5 * i % 11) for i in range(12)]
    advantages = [(-1.0) ** i for i in range(12)]
    return {
        "model_chunks": chunks,
        "optimizer": build_optimizer(OptimConfig(lr=1e-3), chunks, bf16=False),
        "rollouts": [(prompts, responses, advantages)] * 3,
    }


def main(document: str, layout: str) -> None:
    """Run all blocks in one namespace, in order; start the job unless a block does."""
    sizes: Layout = eval(layout, {"Layout": Layout})
    blocks = [
        _LAYOUT.sub(layout, block).replace("parallel_size=2", f"parallel_size={sizes.pp}")
        for block in python_blocks(document)
    ]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if not any("launch.start(" in block for block in blocks):
        launch.start("cpu")
        namespace |= given(sizes)
    for block in blocks:
        source = block.replace("ScheduleAdapter(", "MeasuredAdapter(")
        namespace["MeasuredAdapter"] = MeasuredAdapter
        exec(compile(source, document, "exec"), namespace)
    print(f"norms: {json.dumps(MeasuredAdapter.norms)}")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
