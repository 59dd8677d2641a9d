"""Cases of models with images: a family, a layout, a kind of rows, and what is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapack.layout import Layout
from megapack.policy import Policy
from tests.dist.rows.row_case import layout_of
from tests.dist.run_cases import run_by_world
from tests.dist.spawn import checked_job
from tests.megatron import HAS_HYBRID

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Their decoders are HybridModels, which Megatron-Core has since 0.18."""

PLACES = ("single", "dp2", "tp2", "tp2_sp", "cp2", "pp2", "pp2_vpp2", "dp2_pp2_vpp2", "tp2_sp_pp2")
EXPERT_PLACES = ("dp2_ep2", "dp2_pp2_vpp2_ep2")
# Of recurrent layers: heads of a tiny model do not divide further.
HYBRID_PLACES = ("single", "dp2", "tp2_sp", "cp2", "pp2", "dp2_ep2")


@dataclass(frozen=True)
class Rows:
    """How rows are made."""

    max_tokens: int = 96
    policy: Policy = field(default_factory=Policy)
    shares: bool = False
    """Whether prompt groups share their beginnings, images too."""


ROWS = {
    "whole": Rows(),
    "shared": Rows(shares=True),
    # Cuts are inside of images.
    "pieces": Rows(20, Policy(split_samples="auto")),
    "shared_pieces": Rows(32, Policy(split_samples="auto"), shares=True),
    "wide": Rows(24, Policy(context_parallel="dynamic")),
    "split": Rows(policy=Policy(backward="split")),
}

TRAINED = ("all", "merger", "tower", "frozen")
"""What is trained: everything, the merger alone, the tower alone, or the decoder alone."""
_DECODER = ("embedding.*", "decoder.*", "output_layer.*")
_TOWER = ("visual.patch_embed.*", "visual.blocks.*")


@dataclass(frozen=True)
class VisionCase:
    """One cell."""

    family: str
    place: str
    rows: str = "whole"
    trained: str = "all"
    recompute: str = "none"
    samples: str = "all"
    """See `vision_samples.CHOSEN`."""
    text_step: bool = False
    """A step without images comes after the one that is compared, with an overlapped reduction."""
    waves: bool = False
    """The tower has an image or two in a call, and makes the calls again in its backward."""
    mutation: str = ""
    """What the case does wrong, see `vision_worker`; it must be seen."""

    @property
    def layout(self) -> Layout:
        return layout_of(self.place)

    @property
    def name(self) -> str:
        parts = [self.family, self.place, self.rows, self.trained]
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [self.samples] if self.samples != "all" else []
        parts += ["text_step"] if self.text_step else []
        parts += ["waves"] if self.waves else []
        return "-".join([*parts, *([self.mutation] if self.mutation else [])])

    @property
    def is_hybrid(self) -> bool:
        return self.family in HYBRID_FAMILIES

    @property
    def freeze(self) -> tuple[str, ...]:
        """Patterns of `model.freeze`."""
        if self.trained == "merger":
            tower = _TOWER if self.family == "qwen2_5_vl" else (*_TOWER, "visual.pos_embed.*")
            has_levels = self.family.startswith("qwen3_vl")
            levels = ("visual.deepstack_merger_list.*",) if has_levels else ()
            return (*_DECODER, *tower, *levels)
        return _DECODER if self.trained == "tower" else ()


def _grid() -> Iterable[VisionCase]:
    for family in FAMILIES:
        places = PLACES
        if "moe" in family:
            # Megatron routes each token on one rank: with tensor parallelism only under SP.
            places = (*(place for place in PLACES if place != "tp2"), *EXPERT_PLACES)
        for place in places:
            yield VisionCase(family, place)
            yield VisionCase(family, place, "shared", recompute="full")
            yield VisionCase(family, place, "pieces")
            if place.startswith("dp2"):
                yield VisionCase(family, place, "wide")
            if "pp2" in place:
                yield VisionCase(family, place, "split")
                yield VisionCase(family, place, "shared_pieces")
        for trained, place in itertools.product(("merger", "tower", "frozen"), places):
            yield VisionCase(family, place, "shared", trained)
        yield VisionCase(family, "dp2", text_step=True)
        for place in ("dp2", "tp2_sp", "pp2_vpp2"):
            yield VisionCase(family, place, samples="few")
            yield VisionCase(family, place, recompute="selective")
            yield VisionCase(family, place, waves=True)
        yield VisionCase(family, "pp2", "shared", "merger", recompute="full")
        yield VisionCase(family, "dp2", "shared", "merger", recompute="full", waves=True)
    for family in HYBRID_FAMILIES:
        for place in HYBRID_PLACES:
            if "ep2" in place and "moe" not in family:
                continue
            yield VisionCase(family, place)
            yield VisionCase(family, place, "shared", recompute="full")
            yield VisionCase(family, place, "pieces")
        yield VisionCase(family, "dp2", "wide")
        yield VisionCase(family, "dp2", "shared", "frozen")
        yield VisionCase(family, "pp2", "shared", "merger")


CASES = {case.name: case for case in _grid()}

_MUTATED = (
    VisionCase("qwen3_vl", "single", "shared", mutation="one_key"),
    VisionCase("qwen3_vl", "single", "shared", mutation="token_prefixes"),
    VisionCase("qwen3_vl", "single", recompute="full", mutation="closure"),
    VisionCase("qwen3_vl", "pp2_vpp2", recompute="full", mutation="overwrite"),
    VisionCase("qwen3_vl", "tp2_sp", mutation="no_sum_over_tp"),
    VisionCase("qwen3_vl", "tp2_sp", mutation="average_over_tp"),
    VisionCase("qwen3_vl", "tp2", mutation="counted_per_tp_rank"),
    VisionCase("qwen3_vl", "single", mutation="inv_freq"),
    VisionCase("qwen3_vl", "single", mutation="rotary_by_index"),
    VisionCase("qwen3_vl", "single", mutation="rotary_in_blocks"),
    VisionCase("qwen2_5_vl", "single", mutation="rotary_interleaved"),
    VisionCase("qwen3_vl", "single", "pieces", mutation="cut_from_the_start"),
    VisionCase("qwen3_vl", "single", "pieces", mutation="piece_without_images"),
    VisionCase("qwen3_vl", "single", mutation="levels_swapped"),
    VisionCase("qwen2_5_vl", "single", mutation="no_windows"),
)
MUTATIONS = {case.name: case for case in _MUTATED}
ALL_CASES = CASES | MUTATIONS


def runnable() -> list[str]:
    """The cases that the installed Megatron-Core runs."""
    return [name for name, case in CASES.items() if HAS_HYBRID or not case.is_hybrid]


def make_folders(families: Iterable[str], folder: Path) -> None:
    """A tiny model of each family, and what transformers computes with it; those that are there
    are not made again."""
    absent = [name for name in families if not (folder / f"{name}.pt").exists()]
    if absent:
        args = [str(folder), *absent]
        checked_job(1, "tests.dist.vision.vision_reference", args, timeout_s=300, te="")


def run_vision_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The workers' results, by case."""
    names = sorted(names, key=lambda name: ALL_CASES[name].family)
    make_folders(sorted({ALL_CASES[name].family for name in names}), folder)
    worlds = {name: ALL_CASES[name].layout.world_size for name in names}
    worker = "tests.dist.vision.vision_worker"
    return run_by_world(worker, worlds, str(folder), folder, timeout_s=400)
