"""Process groups that layouts and plans make; each rank writes which groups it asks for.

torchrun --nproc-per-node 4 -m tests.dist.ranks.groups_worker OUT_DIR
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack import Layout, launch
from megapack.job.gpt.build import initialize_parallel
from megapack.schedule.channels import Channels
from megapack.schedule.row_groups import RowGroups
from tests.dist.groups import end_model_parallel
from tests.dist.setup import write_report

PIPELINES = {
    "pp2": Layout(dp=2, pp=2),
    "pp2_vpp2": Layout(dp=2, pp=2, vpp=2),
    "pp4": Layout(pp=4),
    "pp4_vpp2": Layout(pp=4, vpp=2),
}
"""Layouts of four ranks, by name."""
WIDTHS = ({1}, {1, 2}, {2}, {1, 4, 2}, {2, 4})
"""Widths of the rows of successive steps."""
CPU = torch.device("cpu")


def recorded() -> list[list[int] | None]:
    """The ranks of every group that this process asks for from here on; None: all ranks."""
    asked: list[list[int] | None] = []
    make = dist.new_group

    def new_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        asked.append(ranks)
        return make(ranks, *args, **kwargs)

    dist.new_group = new_group
    return asked


def channels_of(layout: Layout, asked: list[list[int] | None]) -> dict[str, Any]:
    """Groups that two adapters of a layout ask for, and what travels over their links."""
    initialize_parallel(layout, 1)
    pp = parallel_state.get_pipeline_model_parallel_group()
    asked.clear()
    channels = Channels(pp, layout.vpp)
    channels.make(CPU)
    first = [*asked]
    Channels(pp, layout.vpp).make(CPU)
    received = _sent_around(channels)
    end_model_parallel()
    return {"asked": first, "again": len(asked) - len(first), **received}


def _sent_around(channels: Channels) -> dict[str, Any]:
    """Each stage sends its global rank to the next one, in both directions, with early receives."""
    found: dict[str, Any] = {}
    for direction, last in (("activations", channels.pp - 1), ("gradients", 0)):
        wraps = channels.vpp > 1
        first = channels.pp - 1 - last
        buffer = torch.tensor([-1])
        work = None
        if wraps or channels.stage != first:
            work = channels.receive(direction, buffer)  # type: ignore[arg-type]
        if wraps or channels.stage != last:
            channels.send(direction, torch.tensor([dist.get_rank()])).wait()  # type: ignore[arg-type]
        if work is not None:
            work.wait()
        sender = channels.source_rank(direction) if work is not None else -1  # type: ignore[arg-type]
        found[direction] = (int(buffer), sender)
    return found


def row_groups_of(layout: Layout, asked: list[list[int] | None]) -> list[Any]:
    """Per step of WIDTHS the groups asked for, and the sizes of this rank's row groups."""
    initialize_parallel(layout, 1)
    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = RowGroups(layout, cp=parallel_state.get_context_parallel_group(), dp_cp=dp_cp)
    found = []
    for widths in WIDTHS:
        asked.clear()
        groups.make({width for width in widths if width in layout.widths}, CPU)
        sizes = {n: None if g is None else g.size() for n, g in groups._groups.items()}
        found.append({"asked": [*asked], "sizes": sizes})
    end_model_parallel()
    return found


def main(out_dir: str) -> None:
    """Run all layouts that fit the job's ranks."""
    launch.start("cpu")
    asked = recorded()
    world = dist.get_world_size()
    found: dict[str, Any] = {"rows": row_groups_of(Layout(dp=world), asked)}
    if world == 4:
        found["rows_of_stages"] = row_groups_of(Layout(dp=2, pp=2), asked)
        found |= {name: channels_of(layout, asked) for name, layout in PIPELINES.items()}
    else:
        found["pp3_vpp2"] = channels_of(Layout(pp=3, vpp=2), asked)
    write_report(out_dir, found)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
