"""The reference on the GPU: `tests.dist.exactness.reference`, one unpadded sample at a time.

python -m tests.gpu.reference DEVICE OUT
"""

from __future__ import annotations

import sys
from typing import Literal, cast

import torch

from megapack import Layout, launch
from megapack.gpt import initialize_parallel
from tests.dist.exactness import reference
from tests.dist.problem import SEED
from tests.gpu import problem
from tests.megatron import HAS_HYBRID


def main(device: Literal["cuda", "cpu"], out: str) -> None:
    """Save the gradient, loss and log-probs of each sample, per model."""
    launch.quiet_known_warnings()
    launch.start(device)
    initialize_parallel(Layout(), SEED)
    batch, families = problem.make_batch(), problem.make_family_batch()
    found = {}
    models = {
        "fp32": (problem.model("sdpa", "fp32"), batch),
        "bf16": (problem.model("sdpa", "bf16"), batch),
        "moe_fp32": (problem.moe_model("sdpa"), batch),
        "families_fp32": (problem.model("sdpa", "fp32"), families),
        "families_bf16": (problem.model("sdpa", "bf16"), families),
    }
    if HAS_HYBRID:
        models["hybrid_fp32"] = problem.hybrid_model("sdpa", "fp32"), families
    for name, (settings, samples) in models.items():
        model = reference.build(settings)
        found[name] = [reference.run_sample(model, samples, i, 1.0) for i in range(len(samples))]
    torch.save(found, out)
    launch.stop()


if __name__ == "__main__":
    main(cast(Literal["cuda", "cpu"], sys.argv[1]), sys.argv[2])
