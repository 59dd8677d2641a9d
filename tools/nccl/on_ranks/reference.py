"""The reference of the several ranks: one process, one unpadded sample at a time.

python -m tools.nccl.on_ranks.reference OUT
"""

from __future__ import annotations

import sys

import torch
from megatron.core.models.gpt import GPTModel

from megapack import Layout, launch
from megapack.job.gpt import initialize_parallel
from megapack.model.parameters import global_parameters
from megapack.samples import SampleBatch
from tests.dist.exactness import reference
from tests.dist.exactness.cases import Case
from tests.dist.exactness.expected import expected_step
from tests.dist.problem import SEED
from tests.gpu.compare import Samples
from tools.nccl import problem
from tools.nccl.on_ranks.progress import note

UPDATED = "updated"
# With a large eps Adam's first step is nearly the gradient, whose rounding errors stay small in it.
LEARNING_RATE = 0.01
ADAM_EPS = 1.0


def updated(model: GPTModel, samples: Samples, batch: SampleBatch) -> Samples:
    """Log-probs and entropies after Adam's first step on all samples; the model changes."""
    plan = problem.FEATURES["overlap"].plan(Layout())
    _, grads = expected_step(Case(layout=Layout()), plan, samples)
    with torch.no_grad():
        for name, param in global_parameters(model):
            grad = grads[name]
            param.sub_((LEARNING_RATE * grad / (grad.abs() + ADAM_EPS)).to(param))
    return [reference.run_sample(model, batch, i, 1.0) for i in range(len(batch))]


def main(out: str) -> None:
    """Save the gradient, loss and log-probs of each sample, by samples and precision."""
    launch.start("cuda")
    initialize_parallel(Layout(), SEED)
    found: dict[str, Samples] = {}
    for samples, dtype in problem.REFERENCES:
        settings = problem.model("sdpa", dtype, has_experts=samples == "experts")
        batch = problem.make_batch(samples)
        model = reference.build(settings)
        name = f"{samples} {dtype}"
        found[name] = [reference.run_sample(model, batch, i, 1.0) for i in range(len(batch))]
        if samples == "plain":
            found[f"{UPDATED} {dtype}"] = updated(model, found[name], batch)
        note(name)
    torch.save(found, out)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
