"""The reference on the GPU: `tests.dist.exactness.reference`, one unpadded sample at a time.

python -m tests.gpu.reference DEVICE OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megapack import Layout, launch
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import initialize_parallel
from megapack.samples import SampleBatch
from tests.dist.exactness import reference
from tests.dist.problem import SEED
from tests.gpu import problem
from tests.megatron import HAS_HYBRID


def run_samples(
    settings: ModelConfig, batch: SampleBatch, routing: Sequence[Tensor] | None = None
) -> list[dict[str, Any]]:
    """The gradient, loss and log-probs of each sample.

    Args:
        routing: the experts of each sample, see `reference.replay`; None = the routers choose.
    """
    model = reference.build(settings)
    found = []
    for i in range(len(batch)):
        if routing is not None:
            reference.replay(model, routing[i].cuda())
        found.append(reference.run_sample(model, batch, i, 1.0))
    return found


def main(device: Literal["cuda", "cpu"], out: str) -> None:
    """Save the gradient, loss and log-probs of each sample, per model."""
    launch.quiet_known_warnings()
    launch.start(device)
    initialize_parallel(Layout(), SEED)
    batch, families = problem.make_batch(), problem.make_family_batch()
    models = {
        "fp32": (problem.model("sdpa", "fp32"), batch),
        "bf16": (problem.model("sdpa", "bf16"), batch),
        "moe_fp32": (problem.moe_model("sdpa"), batch),
        "families_fp32": (problem.model("sdpa", "fp32"), families),
        "families_bf16": (problem.model("sdpa", "bf16"), families),
    }
    if HAS_HYBRID:
        models["hybrid_fp32"] = problem.hybrid_model("sdpa", "fp32"), families
    torch.save({name: run_samples(*model) for name, model in models.items()}, out)
    launch.stop()


if __name__ == "__main__":
    main(cast(Literal["cuda", "cpu"], sys.argv[1]), sys.argv[2])
