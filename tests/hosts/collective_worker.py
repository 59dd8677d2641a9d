"""Two ranks that plan their own samples; each writes the outcome of every case.

torchrun --nproc-per-node 2 -m tests.hosts.collective_worker OUT_DIR
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout
from megapack.hosts import megatron_core, skyrl, verl
from tests.hosts.partitions import evenly

WIDTH = 64


class Batch(dict[str, Any]):
    """A dict of fields, like the batches of verl and SkyRL."""

    metadata: dict[str, Any] | None = None


def batch_of(lengths: list[int]) -> Batch:
    mask = (torch.arange(WIDTH) < torch.tensor(lengths, dtype=torch.long)[:, None]).long()
    return Batch(sequences=mask, input_ids=mask, attention_mask=mask, loss_mask=mask)


def verl_rows(lengths: list[int], budget: int = 64, **settings: Any) -> dict[str, Any]:
    batches, rows = verl.rearrange_micro_batches(
        batch_of(lengths), budget, dp_group=dist.group.WORLD, **settings
    )
    loss_tokens = [int(mb["loss_mask"].sum()) for mb in batches]
    return {"rows": rows, "loss_tokens": loss_tokens}


def skyrl_rows(lengths: list[int], budget: int = 64) -> dict[str, Any]:
    iterator = SimpleNamespace()
    skyrl.init_iterator(iterator, batch_of(lengths), budget)
    padding = iterator._num_padding_microbatches
    tokens = [sum(lengths[i] for i in row) for row in iterator._microbatches]
    return {"padding": padding, "loss_tokens": [*tokens, *[0] * padding]}


class Cases:
    """One case per method. In most, rank 0 has the long samples, and rank 1 the bad input."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def one_count(self) -> Any:
        return verl_rows([60] * 6 if self.rank == 0 else [8] * 9)

    def one_count_in_fours(self) -> Any:
        return verl_rows(
            [60] * 5 + [2] * 5 if self.rank == 0 else [8] * 9, num_batches_divided_by=4
        )

    def a_light_rank(self) -> Any:
        return verl_rows([60] * 6 if self.rank == 0 else [8] * 4)

    def a_light_rank_pads(self) -> Any:
        verl.configure(light_rank="pad")
        return verl_rows([60] * 6 if self.rank == 0 else [8, 7, 9, 8])

    def no_samples(self) -> Any:
        return verl_rows([8, 8] if self.rank == 0 else [])

    def another_budget(self) -> Any:
        return verl_rows([8, 8], budget=64 + self.rank)

    def another_native_layout(self) -> Any:
        # By itself each rank would have another number of micro-batches.
        layout = {"pp": 2, "vpp": 2, "microbatch_group_size": 4}
        verl.read_settings({"megapack": {"layout": layout} if self.rank else None})
        return verl_rows([60] * 6 if self.rank == 0 else [8] * 9)

    def no_budget(self) -> Any:
        return verl_rows([8, 8], budget=None if self.rank else 64)  # type: ignore[arg-type]

    def each_by_itself(self) -> Any:
        return verl_rows([60] * (3 - self.rank), same_micro_num_in_dp=False)

    def skyrl_one_count(self) -> Any:
        return skyrl_rows([60] * 6 if self.rank == 0 else [8] * 4)

    def skyrl_with_a_layout(self) -> Any:
        skyrl.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
        return skyrl_rows([60] * 5 if self.rank == 0 else [8] * 4)

    def skyrl_no_samples(self) -> Any:
        return skyrl_rows([8, 8] if self.rank == 0 else [])


CASES = [name for name in vars(Cases) if not name.startswith("_")]


def outcome(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for module in (verl, skyrl, megatron_core):
            module.configure()


def main() -> None:
    # A rank that waits alone fails after a minute.
    verl._partition = evenly
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    cases = Cases()
    outcomes = {name: outcome(getattr(cases, name)) for name in CASES}
    out = Path(sys.argv[1]) / f"rank{dist.get_rank()}.json"
    out.write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
