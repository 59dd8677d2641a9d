"""xtuner: packs of one length as `[dp][step][pack]`, in exactly the requested number of steps.

    samples -> `optimizer_steps` steps of even tokens -> even ranks in each -> packs of each rank

The host packs first and cuts packs into steps afterwards: 44 packs for 16 steps, 3 packs each, make
15 steps.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, PlanError
from megapack.hosts import patching
from megapack.hosts.shared.options import HostOptions
from megapack.layout import Layout, round_up
from megapack.policy import Policy

PackedIndices = list[list[list[list[int]]]]
"""`[dp][step][pack][sample index]`; `[]` is a pack of padding only."""

_STRATEGIES = ("balance", "native")

_PACKING = "xtuner.v1.rl.trainer.controller.TrainingController._packing"

_PADDING_PACK = 128
"""Tokens of a pack without samples. The host's have `pack_max_length`, and are computed in full."""


@dataclass(frozen=True, kw_only=True)
class XtunerOptions:
    """How `TrainingController` packs; the controller's process alone reads them."""

    pack_strategy: str = "balance"
    """"balance": each optimizer step gets about equal tokens. "native": steps keep the order in
    which samples arrive."""
    pack_multiple: int | None = None
    """Packs are padded to a multiple of so many tokens. None: to `pack_max_length`, as the host
    does, which with `torch_compile` compiles layers for one length."""

    def __post_init__(self) -> None:
        if self.pack_strategy not in _STRATEGIES:
            raise ConfigError(f"pack_strategy={self.pack_strategy!r}; set one of {_STRATEGIES}")
        if self.pack_multiple is not None and self.pack_multiple < 1:
            raise ConfigError(f"pack_multiple={self.pack_multiple}; set at least 1, or None")


_OPTIONS = HostOptions(XtunerOptions())
configure = _OPTIONS.configure


def plan_packs(
    lengths: Sequence[int], pack_max_length: int, dp: int, steps: int, pack_strategy: str
) -> PackedIndices:
    """Plan one iteration; in each step all workers get the same number of packs.

    Args:
        lengths: tokens per sample.
        pack_max_length: tokens of every pack, on all workers of a replica together.
        dp: replicas.
        steps: exact number of steps of the iteration, at most one per sample.
        pack_strategy: see `XtunerOptions`.

    Raises:
        PlanError: a sample over `pack_max_length`.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > pack_max_length:
        raise PlanError(
            f"sample {longest} of {lengths[longest]} tokens exceeds pack_max_length="
            f"{pack_max_length}; raise it or cut the sample"
        )
    plan = build_dp_schedule(
        lengths,
        layout=Layout(dp=dp),
        max_tokens_per_gpu=pack_max_length,
        num_steps=steps,
        # A pack is always computed at full length, so the fewest packs are best.
        cost=CostModel(fixed=float(pack_max_length), per_token=1e-3),
        policy=Policy(step_split="contiguous" if pack_strategy == "native" else "balanced"),
    )
    return [
        [[list(mb.samples) for mb in step.ranks[rank]] for step in plan.steps] for rank in range(dp)
    ]


def pack_rollout(
    self: Any, data_batches: Sequence[Any], pack_max_length: int, language_cfg: Any
) -> list[dict[str, Any]]:
    """Packs of one training iteration; `_packing` of `TrainingController`, whose `fit` calls it.

    `fit` gives pack i to worker group i % dp, and workers cut their packs into `optimizer_steps`
    parts of equally many. So packs are planned as `[dp][step][pack]`, steps get equally many by
    packs without samples, which have 128 tokens, and packs are listed step by step with dp packs in
    turn. A pack is filled and padded by the host's own `_packing`.

    Args:
        self: the host's controller. Its first worker is asked for its number of steps.
        data_batches: the host's samples, `ColateItem`.
        pack_max_length: tokens of a pack.
        language_cfg: the host's, for router replay.

    Returns:
        The host's packs, a multiple of dp * steps.

    Raises:
        PlanError: a sample over `pack_max_length`.
    """
    start = time.perf_counter()
    options = _OPTIONS.current
    lengths = [data["seq_ctx"].input_ids.numel() for data in data_batches]
    replicas, steps = _settings_of(self.workers[0])
    dp, num_steps = len(self.workers) // replicas, min(steps, len(lengths))
    planned = plan_packs(lengths, pack_max_length, dp, num_steps, options.pack_strategy)
    order = list(_in_turn(planned, lengths))
    tokens = [
        _padded_tokens(sum(lengths[i] for i in pack), pack_max_length, options.pack_multiple)
        for pack in order
    ]
    seconds = time.perf_counter() - start
    if num_steps < steps:
        self.logger.warning(
            f"megapack: {len(lengths)} samples are too few for optimizer_steps={steps}; this "
            f"iteration has {num_steps} steps"
        )
    num_packs = len(order) // (dp * num_steps)
    self.logger.info(
        f"megapack: {len(lengths)} samples in {num_steps} steps of {num_packs} packs on each of "
        f"{dp} replicas; {1 - sum(lengths) / sum(tokens):.1%} of {sum(tokens)} tokens are padding; "
        f"planned in {seconds:.4f} s"
    )
    return [
        _filled(self, data_batches, pack, size, language_cfg)
        for pack, size in zip(order, tokens, strict=True)
    ]


def _settings_of(worker: Any) -> tuple[int, int]:
    """Workers that share a replica's data, and optimizer steps of an iteration."""
    import ray

    steps = worker.__ray_call__.remote(operator.attrgetter("_optimizer_steps"))
    replicas, num_steps = ray.get([worker.get_data_replicate_size.remote(), steps])
    return int(replicas), int(num_steps)


def _in_turn(planned: PackedIndices, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Packs of all steps, one of each replica in turn, with equally many in every step.

    Workers wait for each other in every pack, so packs that run together are of similar size.
    """
    count = max(len(step) for step in planned[0])
    for steps in zip(*planned, strict=True):
        columns = [
            sorted(step, key=lambda pack: -sum(lengths[i] for i in pack))
            + [[] for _ in range(count - len(step))]
            for step in steps
        ]
        for packs in zip(*columns, strict=True):
            yield from packs


def _padded_tokens(tokens: int, pack_max_length: int, multiple: int | None) -> int:
    if not tokens:
        return min(multiple or _PADDING_PACK, pack_max_length)
    return pack_max_length if multiple is None else min(round_up(tokens, multiple), pack_max_length)


def _filled(
    controller: Any, data_batches: Sequence[Any], pack: list[int], tokens: int, language_cfg: Any
) -> dict[str, Any]:
    """The host's pack of these samples, padded to so many tokens."""
    planned = copy.copy(controller)
    planned._get_pack_infos = lambda *args, **kwargs: [{"indices": pack}]
    (filled,) = patching.original(_PACKING)(planned, data_batches, tokens, language_cfg)
    return dict(filled)
