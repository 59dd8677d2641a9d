"""xtuner: packs of one length as `[dp][step][pack]`, in exactly the requested number of steps.

    samples -> `optimizer_steps` steps of even tokens -> even ranks in each -> packs of each rank

The host's older strategies pack first and distribute packs over steps afterwards: 44 packs for 16
steps, 3 packs each, make 15 steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.policy import Policy

__all__ = ["RLDataPacker"]

logger = logging.getLogger(__name__)

PackedIndices = list[list[list[list[int]]]]
"""`[dp][step][pack][sample index]`; `[]` is a pack of padding only."""

_STRATEGIES = ("balance", "native", "greedy", "legacy")


class RLDataPacker:
    """Plans packs of indices; workers fill them with samples and pad them to `pack_max_length`.

    Args:
        pack_max_length: tokens of every pack, on all workers of a replica together.
        world_size: number of training workers.
        data_replicate_size: number of workers that share one replica's data (SP * TP).
        optimizer_steps: exact number of steps of one training iteration.
        pack_strategy: "balance" spreads samples over steps by tokens. "native" keeps the input
            order from step to step. "greedy" and "legacy", which pack first in xtuner, are planned
            as "balance".
        pack_seed: ignored; nothing is random.

    Raises:
        ConfigError: an unknown strategy, or workers that do not divide into replicas.
    """

    def __init__(
        self,
        pack_max_length: int,
        world_size: int,
        data_replicate_size: int,
        optimizer_steps: int,
        pack_strategy: str = "balance",
        pack_seed: int | None = None,
    ) -> None:
        if pack_strategy not in _STRATEGIES:
            raise ConfigError(
                f"Unknown packing strategy: {pack_strategy!r}; set one of {_STRATEGIES}"
            )
        if data_replicate_size < 1 or world_size % data_replicate_size:
            raise ConfigError(
                f"world_size={world_size} does not divide by data_replicate_size="
                f"{data_replicate_size}; set a divisor"
            )
        self.pack_max_length = pack_max_length
        self.dp_size = world_size // data_replicate_size
        self.optimizer_steps = optimizer_steps
        self.pack_strategy = pack_strategy
        self.seconds = 0.0
        """Seconds that the last `pack` took."""
        if pack_strategy in ("greedy", "legacy"):
            logger.info("pack_strategy=%r is planned as 'balance': steps first", pack_strategy)
        logger.info(
            "xtuner counts tokens per pack: pack_max_length=%d on %d replicas",
            pack_max_length,
            self.dp_size,
        )

    def pack(self, data_lengths: Sequence[int]) -> tuple[PackedIndices, int]:
        """Plan one iteration; in each step all workers get the same number of packs.

        Args:
            data_lengths: tokens per sample.

        Returns:
            packs: `[dp][step][pack][sample index]`.
            padding_tokens: padding of all packs together.

        Raises:
            ValueError: a sample over `pack_max_length`, or fewer samples than steps.
        """
        start = time.perf_counter()
        num_samples = len(data_lengths)
        if num_samples == 0:
            return [], 0
        self._check(data_lengths)
        plan = build_dp_schedule(
            data_lengths,
            layout=Layout(dp=self.dp_size),
            max_tokens_per_gpu=self.pack_max_length,
            num_steps=self.optimizer_steps,
            # A pack is always computed at full length, so the fewest packs are best.
            cost=CostModel(fixed=float(self.pack_max_length), per_token=1e-3),
            policy=Policy(
                step_split="contiguous" if self.pack_strategy == "native" else "balanced",
                oversize="error",
            ),
        )
        packs = _by_rank(plan)
        num_packs = [step.num_microbatches or 0 for step in plan.steps]
        padding = sum(num_packs) * self.dp_size * self.pack_max_length - sum(data_lengths)
        self.seconds = time.perf_counter() - start
        logger.info(
            "%d samples in %d steps of %s packs per replica, %d padding tokens, packed in %.4f s",
            num_samples,
            len(num_packs),
            num_packs,
            padding,
            self.seconds,
        )
        return packs, padding

    def _check(self, data_lengths: Sequence[int]) -> None:
        for index, length in enumerate(data_lengths):
            if length > self.pack_max_length:
                raise PlanError(
                    f"sample {index} of {length} tokens exceeds pack_max_length="
                    f"{self.pack_max_length}; raise it or cut the sample"
                )
        if len(data_lengths) < self.optimizer_steps:
            raise PlanError(
                f"{len(data_lengths)} samples for optimizer_steps={self.optimizer_steps}: a step "
                f"would train on nothing; set at most {len(data_lengths)}"
            )


def _by_rank(plan: Plan) -> PackedIndices:
    return [
        [[list(mb.samples) for mb in step.ranks[rank]] for step in plan.steps]
        for rank in range(plan.layout.dp)
    ]
