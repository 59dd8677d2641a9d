"""`Space`: the layouts, budgets and rules that `tune` tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.layout import CountRule, Layout
from megapack.plan.facts import FEATURES
from megapack.plan.plan import Plan
from megapack.policy import Backward, ContextParallel, SplitSamples

_MAX_VPP = 8


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


@dataclass(frozen=True, kw_only=True)
class Space:
    """Layouts, budgets and rules to try.

    Raises:
        ConfigError: a size below 1.
    """

    num_gpus: int
    tp: Sequence[int] = (1,)
    cp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    etp: Sequence[int] = (1,)
    """Sizes that do not divide a layout's tp are left out of it."""
    pp: Sequence[int] | None = None
    """None: all sizes that divide the GPUs and, without `uneven`, the layers."""
    vpp: Sequence[int] | None = None
    """None: all sizes up to 8 that, without `uneven`, divide a stage's layers."""
    budgets: Sequence[int] | None = None
    """max_tokens_per_gpu; None: the longest sample's, doubled up to four times while it fits, and
    where rows may lie over several ranks or samples be split a quarter, a half and all of it."""
    count_rule: Sequence[CountRule] = ("legal",)
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

    def layouts(
        self, sizes: ModelSizes, mean_length: float
    ) -> Iterator[tuple[Layout, StageLayers]]:
        """Every layout that fills the GPUs and divides the model, with each split of its layers.

        Args:
            mean_length: tokens of a typical sample, for splits that balance chunks.
        """
        for layout in self._layouts(sizes):
            for split in self._splits(sizes, layout, mean_length):
                yield layout, split

    def _splits(
        self, sizes: ModelSizes, layout: Layout, mean_length: float
    ) -> Iterator[StageLayers]:
        given = self.given_split(layout)
        if given is not None:
            yield given
            return
        num_layers = sizes.num_stage_layers
        divides = num_layers % layout.num_chunks == 0
        if divides:
            yield StageLayers.even(num_layers, pp=layout.pp, vpp=layout.vpp)
        if self.uneven and num_layers >= layout.num_chunks:
            balanced = sizes.balanced_stage_layers(layout, mean_length)
            if not (divides and balanced.is_even):
                yield balanced

    def _layouts(self, sizes: ModelSizes) -> Iterator[Layout]:
        """Every layout that fills the GPUs and divides the model but for its layers."""
        num_layers = sizes.num_stage_layers
        stages = self.pp or range(1, min(self.num_gpus, num_layers) + 1)
        for tp, cp, ep, etp, pp in itertools.product(self.tp, self.cp, self.ep, self.etp, stages):
            ranks = tp * cp * pp
            dp = self.num_gpus // ranks
            if self.num_gpus % ranks or tp % etp or (dp * cp * tp) % (etp * ep):
                continue
            if not _divides(sizes, tp, ep, etp) or sizes.max_width(Layout(tp=tp, cp=cp)) == 0:
                continue
            for vpp in self.vpp or range(1, _MAX_VPP + 1):
                if pp > 1 or vpp == 1:
                    yield Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        vpp=vpp,
                        cp=cp,
                        ep=ep,
                        etp=etp,
                        sequence_parallel=tp > 1,
                    )


def _divides(sizes: ModelSizes, tp: int, ep: int, etp: int) -> bool:
    """Whether TP divides the widths that it splits, EP the experts, and expert TP their width."""
    ranks = {"tp": tp, "ep": ep, "etp": etp}
    has_experts = sizes.num_experts is not None or etp == 1
    return has_experts and all(size % ranks[by] == 0 for size, by in sizes.divided().values())
