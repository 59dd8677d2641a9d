"""Sweeps: which candidates are tried, which fit, and how they are ranked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import ConfigError, CostModel, Layout, ModelSizes, Policy
from megapack.cost import LayerSplit, StageLayers
from megapack.cost.memory import MemoryModel
from megapack.outlook.tune import Tuning, Workload, tune
from megapack.outlook.tune_space import Space

pytestmark = pytest.mark.unit

SIZES = ModelSizes(
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    vocab_size=1000,
    dtype="bf16",
    untie_embeddings=True,
)
LENGTHS = np.random.default_rng(0).integers(20, 400, 64)


def work(memory_bytes: int = 2**40, **changes: object) -> Workload:
    found = Workload(
        lengths=LENGTHS,
        rollout_ids=None,
        colocate_ids=None,
        global_batch_size=None,
        num_steps=None,
        policy=Policy(search=64),
        memory=MemoryModel(sizes=SIZES),
        memory_bytes=memory_bytes,
        cost_of=lambda layout, split: CostModel.from_model(
            SIZES, layout=layout, flops_per_gpu=1e12, fixed=1e-5
        ),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_layouts_fill_the_gpus_and_divide_the_model() -> None:
    space = Space(num_gpus=8, tp=(1, 2, 16), ep=(1, 2))
    pairs = list(space.layouts(SIZES, 300.0))
    found = [layout for layout, _ in pairs]
    assert all(split.is_even and split.total == 8 for _, split in pairs)
    assert all(layout.world_size == 8 and 8 % layout.num_chunks == 0 for layout in found)
    assert {(layout.tp, layout.pp) for layout in found} == {
        (tp, pp) for tp in (1, 2) for pp in (1, 2, 4, 8) if tp * pp <= 8
    }
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in found)
    assert {layout.vpp for layout in found if layout.pp == 2} == {1, 2, 4}
    assert {layout.ep for layout in found} == {1}
    assert len(found) == len(set(found))


def test_layouts_of_experts_are_split_by_ep_and_etp() -> None:
    experts = replace(SIZES, num_experts=4, ffn_hidden_size=SIZES.ffn_hidden_size + 2)
    space = Space(num_gpus=8, tp=(4,), pp=(1,), ep=(1, 4, 8), etp=(1, 2, 4, 8))
    found = {(layout.ep, layout.etp) for layout, _ in space.layouts(experts, 300.0)}
    # 4 experts have no 8 parts, their width no 4; 4 * 2 ranks fill all 8; etp=8 is above tp.
    assert found == {(1, 1), (1, 2), (4, 1), (4, 2)}
    dense = replace(space, ep=(1,)).layouts(SIZES, 300.0)
    assert {layout.etp for layout, _ in dense} == {1}


@pytest.fixture(scope="module")
def found() -> Tuning:
    space = Space(num_gpus=4, pp=(1, 2, 4), count_rule=("legal", "multiple"))
    return tune(work(), space)


def test_budgets_begin_with_the_longest_sample(found: Tuning) -> None:
    budgets = {candidate.max_tokens_per_gpu for candidate in found.ranked}
    assert min(budgets) == LENGTHS.max()
    assert budgets <= {int(LENGTHS.max()) << k for k in range(5)}


def test_the_limit_counts_full_rows_in_flight(found: Tuning) -> None:
    limit = sorted(candidate.memory.total for candidate in found.ranked)[len(found.ranked) // 2]
    fitting = tune(work(limit), Space(num_gpus=4, pp=(1, 2, 4)))
    assert fitting.ranked
    for candidate in fitting.ranked:
        layout = candidate.layout
        budget = candidate.max_tokens_per_gpu
        live = budget * layout.chunks_in_flight() / layout.vpp
        assert candidate.report.peak_live_tokens <= live
        memory = MemoryModel(sizes=SIZES).fullest_stage(layout, live_tokens=live, row_tokens=budget)
        assert candidate.memory == memory
        assert memory.total <= limit


def priced(layout: Layout, split: StageLayers) -> CostModel:
    return CostModel.from_model(
        SIZES, layout=layout, flops_per_gpu=1e12, fixed=1e-5, stage_layers=split
    )


def test_uneven_splits_are_tried_too() -> None:
    """A vocabulary as costly as 1.8 layers takes layers from its chunk; pp=3 becomes legal."""
    sizes = replace(SIZES, vocab_size=8000)
    space = Space(num_gpus=3, pp=(3,), vpp=(1, 2, 8), uneven=True)
    assert [(layout.vpp, split.num_layers) for layout, split in space.layouts(sizes, 300.0)] == [
        (1, (3, 3, 2)),
        (2, (1, 2, 2, 2, 1, 0)),
    ]
    space = Space(num_gpus=2, pp=(2,), vpp=(1,), uneven=True)
    found = tune(work(memory=MemoryModel(sizes=sizes), cost_of=priced), space)
    splits = {candidate.stage_layers.num_layers for candidate in found.ranked}
    assert splits == {(4, 4), (5, 3)}
    by_split = {c.stage_layers.num_layers: c for c in reversed(found.ranked)}
    last = by_split[(5, 3)].memory
    assert last != by_split[(4, 4)].memory
    assert found.num_layouts == 2


def test_a_given_split_is_the_only_one_where_it_fits() -> None:
    def given(layout: Layout) -> StageLayers | None:
        keys = LayerSplit(pipeline_model_parallel_layout="Et*3|t*5L")
        return keys.stage_layers(8, pp=2) if layout.pp == 2 else None

    space = Space(num_gpus=4, pp=(1, 2, 4), vpp=(1,), given_split=given)
    assert [split.num_layers for _, split in space.layouts(SIZES, 300.0)] == [
        (8,),
        (3, 5),
        (2, 2, 2, 2),
    ]


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp \[3\].*8 GPUs"):
        tune(work(), Space(num_gpus=8, tp=(3,)))
    alone = Space(num_gpus=4, pp=(1,), split_samples=("auto",))
    with pytest.raises(ConfigError, match=r"split_samples \['auto'\].* pieces and split .* pp > 1"):
        tune(work(), alone)


class TestPassedOver:
    """Layouts whose busiest stage alone is slower than the fastest plans of others."""

    # The head is as much work as six layers.
    sizes = replace(SIZES, vocab_size=50_000)
    space = Space(num_gpus=8, split_samples=("off", "auto"), context_parallel=("fixed", "dynamic"))

    def work(self, **changes: object) -> Workload:
        return work(
            memory=MemoryModel(sizes=self.sizes),
            cost_of=lambda layout, split: CostModel.from_model(
                self.sizes, layout=layout, flops_per_gpu=1e12, fixed=1e-5
            ),
            **changes,
        )

    def test_they_are_not_planned_and_the_fastest_are_those_of_a_whole_sweep(self) -> None:
        every = tune(self.work(), self.space)
        found = tune(self.work(), self.space, num_best=3)
        assert every.num_passed_over == 0
        assert found.num_passed_over > 0.3 * every.num_plans
        fastest = [(c.layout, c.kind, c.report) for c in every.best_of_layouts[:3]]
        assert [(c.layout, c.kind, c.report) for c in found.best_of_layouts[:3]] == fastest
