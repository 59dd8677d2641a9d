"""Two ranks that plan micro-batches together; rank 0 prints the outcomes of both as JSON."""

from __future__ import annotations

import json
import logging

import torch.distributed as dist

from megapack import MegapackError
from megapack.hosts.unirl import MicroPlan, plan_micro_batches

# Name -> for each rank: response lengths, samples of the track, micro_token_budget.
CASES: dict[str, list[tuple[list[int] | None, int, int]]] = {
    "unequal": [([30] * 8, 8, 100), ([90] * 4 + [10] * 4, 8, 100)],
    "no lengths on rank 1": [([30] * 8, 8, 100), (None, 8, 100)],
    "rank 1 cannot divide": [([30] * 8, 8, 100), ([30] * 7, 7, 100)],
    "rank 1 has garbage": [([30] * 8, 8, 100), (["x"] * 8, 8, 100)],  # type: ignore[list-item]
    "budgets differ": [([30] * 8, 8, 100), ([30] * 8, 8, 90)],
    "no budget of rank 1": [([30] * 8, 8, 100), ([30] * 8, 8, 0)],
    "too few on rank 0": [([10] * 2, 2, 100), ([90] * 8, 8, 100)],
}


def outcome(lengths: list[int] | None, num_samples: int, budget: int) -> str | MicroPlan | None:
    try:
        return plan_micro_batches(
            lengths, num_samples=num_samples, num_updates=2, micro_token_budget=budget
        )
    except MegapackError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    dist.init_process_group("gloo")
    outcomes: dict[str, object] = {}
    for name, ranks in CASES.items():
        result = outcome(*ranks[dist.get_rank()])
        outcomes[name] = result
        if isinstance(result, MicroPlan):
            shares = [result.token_shares(update) for update in range(2)]
            outcomes[name] = [result.order, result.updates, shares]
    of_ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, outcomes)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(of_ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
