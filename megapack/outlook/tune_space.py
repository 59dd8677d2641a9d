"""`Space`: the layouts, budgets and rules that `tune` tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from megapack.base.arrays import Ints
from megapack.base.choices import Recompute
from megapack.cost.assumed import GpuSpeed
from megapack.cost.sizes import ModelSizes, typical_length
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.facts import FEATURES
from megapack.plan.plan import Plan
from megapack.policy import Backward, ContextParallel, SplitSamples

_MAX_VPP = 8
# CP is tried while a GPU has so many tokens of the longest sample: 16,384 tokens on 1 and 2 ranks.
# Both numbers are chosen by hand.
_LEAST_CP_TOKENS = 8192
_MAX_CP = 16


class Kind(NamedTuple):
    """What plans may do beside packing rows of whole samples for Megatron's schedules."""

    context_parallel: ContextParallel = "fixed"
    split_samples: SplitSamples = "off"
    backward: Backward = "joint"

    @property
    def has_orders(self) -> bool:
        """Whether steps may have an order of their own."""
        return self.split_samples == "auto" or self.backward == "split"

    @property
    def cuts_samples(self) -> bool:
        """Whether a row may hold less than a sample."""
        return self.context_parallel == "dynamic" or self.split_samples == "auto"

    def has(self, plan: Plan) -> bool:
        """Whether a plan does all that it may; else it is a plan of another kind."""
        counts = plan.counts
        return all(
            getattr(self, feature.setting, feature.off) == feature.off or feature.shown(counts)
            for feature in FEATURES
        )


class Setup(NamedTuple):
    """What a run sets before it plans."""

    layout: Layout
    stage_layers: StageLayers
    recompute: Recompute


@dataclass(frozen=True, kw_only=True)
class Space:
    """Layouts, budgets and rules to try. Sizes that do not divide a layout are left out of it.

    Raises:
        ConfigError: a size below 1.
    """

    num_gpus: int
    tp: Sequence[int] | None = None
    """None: all sizes within a node of 8 GPUs that divide it."""
    cp: Sequence[int] | None = None
    """None: 1, 2, 4, 8 and 16 while a GPU has 8192 tokens or more of the longest sample."""
    ep: Sequence[int] | None = None
    """None: all sizes that divide the experts."""
    etp: Sequence[int] | None = None
    """None: all sizes that divide tp."""
    recompute: Sequence[Recompute] = get_args(Recompute)
    pp: Sequence[int] | None = None
    """None: all sizes that divide the GPUs and, without `uneven`, the layers."""
    vpp: Sequence[int] | None = None
    """None: all sizes up to 8 that, without `uneven`, divide a stage's layers."""
    budgets: Sequence[int] | None = None
    """max_tokens_per_gpu; None: the longest sample's, doubled up to four times while it fits, and
    where rows may lie over several ranks or samples be split a quarter, a half and all of it."""
    context_parallel: Sequence[ContextParallel] = ("fixed",)
    """"dynamic" is tried with dp > 1, token budgets and one M for all ranks."""
    split_samples: Sequence[SplitSamples] = ("off",)
    """"auto" is tried with pp > 1 and planned rows."""
    backward: Sequence[Backward] = ("joint",)
    """"split" is tried with pp > 1. Where steps may have orders of their own, by "split" or "auto",
    the first count rule alone is tried."""
    uneven: bool = False
    """For each layout, also try the split of layers over chunks that balances the embedding and the
    head."""
    given_split: Callable[[Layout], StageLayers | None] = lambda layout: None
    """The only split to try on a layout; None: it has none for that."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "etp", "pp", "vpp", "budgets"):
            for value in getattr(self, name) or ():
                if value < 1:
                    raise ConfigError(f"{name} {value}; set integers of at least 1")
        if self.num_gpus < 1:
            raise ConfigError(f"{self.num_gpus} GPUs; set at least 1")

    def setups(self, sizes: ModelSizes, lengths: Ints) -> Iterator[list[Setup]]:
        """Setups of all layouts that fill the GPUs and divide the model, with each split of layers.

        Those of a list differ in ep, etp and recomputation only: the first one that fits is the
        fastest. Recomputation costs operations, and experts traffic, which is not predicted: that
        between nodes comes last.

        Args:
            lengths: of the samples. The longest decides which cp are tried, a typical one splits
                that balance chunks.
        """
        typical = typical_length(lengths)
        for layout in self._layouts(sizes, int(lengths.max())):
            layouts = list(self._with_experts(sizes, layout))
            for split in self._splits(sizes, layout, typical):
                found = itertools.product(layouts, (split,), self.recompute)
                if layouts:
                    yield sorted(itertools.starmap(Setup, found), key=_expense)

    def _splits(
        self, sizes: ModelSizes, layout: Layout, mean_length: float
    ) -> Iterator[StageLayers]:
        given = self.given_split(layout)
        if given is not None:
            yield given
            return
        num_layers = sizes.num_layers
        divides = num_layers % layout.num_chunks == 0
        if divides:
            yield StageLayers.even(num_layers, pp=layout.pp, vpp=layout.vpp)
        if self.uneven and num_layers >= layout.num_chunks:
            balanced = sizes.balanced_stage_layers(layout, mean_length)
            if not (divides and balanced.is_even):
                yield balanced

    def _layouts(self, sizes: ModelSizes, longest: int) -> Iterator[Layout]:
        """Every layout that fills the GPUs and divides the model but for its layers and experts."""
        num_layers = sizes.num_layers
        tps = self.tp or _divisors(min(GpuSpeed.node_gpus, self.num_gpus))
        cps = self.cp or [
            cp for cp in _divisors(_MAX_CP) if cp == 1 or longest >= cp * _LEAST_CP_TOKENS
        ]
        stages = self.pp or range(1, min(self.num_gpus, num_layers) + 1)
        for tp, cp, pp in itertools.product(tps, cps, stages):
            if self.num_gpus % (tp * cp * pp) or sizes.max_width(Layout(tp=tp, cp=cp)) == 0:
                continue
            dp = self.num_gpus // (tp * cp * pp)
            for vpp in self.vpp or range(1, _MAX_VPP + 1):
                if pp > 1 or vpp == 1:
                    yield Layout(dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, sequence_parallel=tp > 1)

    def _with_experts(self, sizes: ModelSizes, layout: Layout) -> Iterator[Layout]:
        """The layout with each size of ep and etp that divides it and the model."""
        eps = self.ep or _divisors(sizes.num_experts or 1)
        for ep, etp in itertools.product(eps, self.etp or _divisors(layout.tp)):
            if layout.tp % etp or (layout.dp * layout.cp * layout.tp) % (etp * ep):
                continue
            if _divides(sizes, layout.tp, ep, etp):
                yield replace(layout, ep=ep, etp=etp)


def _expense(setup: Setup) -> tuple[bool, int, int, int]:
    # EP beyond the GPUs that NVLink connects comes last.
    ep, etp = setup.layout.ep, setup.layout.etp
    return ep * etp > GpuSpeed.node_gpus, get_args(Recompute).index(setup.recompute), etp, ep


def _divisors(size: int) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0]


def _divides(sizes: ModelSizes, tp: int, ep: int, etp: int) -> bool:
    """Whether TP divides the widths that it splits, EP the experts, and expert TP their width."""
    ranks = {"tp": tp, "ep": ep, "etp": etp}
    has_experts = sizes.num_experts is not None or etp == 1
    return has_experts and all(size % ranks[by] == 0 for size, by in sizes.divided().values())
