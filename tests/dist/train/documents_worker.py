"""Runs the Python blocks of a document on four ranks, with the names that its text assumes.

torchrun --nproc-per-node 4 -m tests.dist.train.documents_worker DOCUMENT
"""

from __future__ import annotations

import sys
from typing import Any

from megapack import Layout, launch
from tests.dist.setup import build_chunks
from tests.documents import python_blocks


def given() -> dict[str, Any]:
    """The names that a user's own loop defines: a model on its layout, and rollouts."""
    return {
        "model_chunks": build_chunks(Layout(dp=2, pp=2, vpp=2)),
        "prompts": [[1 + i % 5] * (1 + 3 * i % 7) for i in range(12)],
        "responses": [[2 + i % 3] * (1 + 5 * i % 11) for i in range(12)],
        "advantages": [(-1.0) ** i for i in range(12)],
    }


def main(document: str) -> None:
    """Run all blocks in one namespace, in order; start the job unless a block does."""
    blocks = python_blocks(document)
    own_job = any("launch.start(" in block for block in blocks)
    if not own_job:
        launch.start("cpu")
    namespace: dict[str, Any] = {"__name__": "__main__"} if own_job else given()
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)
    print(f"ran {len(blocks)} blocks; the loss is finite: {abs(namespace['result'].loss) < 1e9}")
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
