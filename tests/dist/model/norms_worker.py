"""Gradient norms of a step by Megatron's optimizers.

torchrun --nproc-per-node N -m tests.dist.model.norms_worker OUT_DIR MODEL/LAYOUT ...
"""

from __future__ import annotations

import sys

from megapack import build_dp_schedule, launch
from megapack.model.head import unwrapped
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness.worker import optimizer_norm
from tests.dist.groups import end_model_parallel
from tests.dist.rows.row_case import layout_of
from tests.dist.setup import build_chunks, write_report


def norm_of(model: str, place: str, *, distributed: bool, marked: bool) -> float:
    """The norm on this rank.

    Args:
        distributed: whether the optimizer is sharded.
        marked: whether the model has the marks of `build_model`; one of a user's own has not.
    """
    layout = layout_of(place)
    chunks = build_chunks(
        layout,
        model=problem.shallow(problem.MODELS[model][0]),
        distributed_optimizer=distributed,
    )
    for chunk in chunks if not marked else ():
        for name, param in unwrapped(chunk).named_parameters():
            if name.endswith("softmax_offset") or (".experts." in name and param.dim() == 1):
                param.tensor_model_parallel = False
    batch = problem.make_batch(8)
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
    adapter = ScheduleAdapter(chunks, layout=layout)
    adapter.step(plan, batch, objective=problem.OBJECTIVE)
    return optimizer_norm(chunks)


def main(out_dir: str, *names: str) -> None:
    """Run the cases and write `OUT_DIR/rank<r>.json`."""
    launch.start("cpu")
    found = {}
    for name in names:
        model, place = name.split("/")
        found[name] = {}
        for distributed in (False, True):
            kind = "distributed" if distributed else "unmarked"
            norm = norm_of(model, place, distributed=distributed, marked=distributed)
            found[name][kind] = norm
            # Not in `norm_of`: threads of groups end with the last reference to them.
            end_model_parallel()
    write_report(out_dir, found)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
