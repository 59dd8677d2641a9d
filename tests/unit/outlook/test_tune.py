"""Sweeps: which candidates are tried, which fit, and how they are ranked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import ConfigError, CostModel, Layout, ModelSizes, PlanError, Policy
from megapack.cost import LayerSplit, StageLayers
from megapack.cost.memory import MemoryModel
from megapack.outlook.tune import Candidate, Trial, Tuning, Workload, tune
from megapack.outlook.tune_space import Kind, Setup, Space

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
        cost_of=lambda setup: CostModel.from_model(
            SIZES, layout=setup.layout, flops_per_gpu=1e12, fixed=1e-5
        ),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_layouts_fill_the_gpus_and_divide_the_model() -> None:
    space = Space(num_gpus=8, tp=(1, 2, 16), ep=(1, 2), recompute=("none",))
    setups = [setup for (setup,) in space.setups(SIZES, LENGTHS)]
    found = [setup.layout for setup in setups]
    assert all(setup.stage_layers.is_even for setup in setups)
    assert all(setup.stage_layers.total == 8 for setup in setups)
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
    (setups,) = space.setups(experts, LENGTHS)
    # 4 experts have no 8 parts, their width no 4; 4 * 2 ranks fill all 8; etp=8 is above tp.
    # What costs least comes first: no recomputation, and experts that TP does not split.
    assert [(one.recompute, one.layout.ep, one.layout.etp) for one in setups] == [
        (recompute, ep, etp)
        for recompute in ("none", "selective", "full")
        for ep, etp in ((1, 1), (4, 1), (1, 2), (4, 2))
    ]
    (dense,) = replace(space, ep=(1,), recompute=("none",)).setups(SIZES, LENGTHS)
    assert [one.layout.etp for one in dense] == [1]


def test_experts_over_several_nodes_come_last() -> None:
    experts = replace(SIZES, num_experts=16)
    space = Space(num_gpus=16, tp=(1,), cp=(1,), pp=(1,), recompute=("full", "none"))
    (setups,) = space.setups(experts, LENGTHS)
    assert [(one.recompute, one.layout.ep) for one in setups] == [
        *(("none", ep) for ep in (1, 2, 4, 8)),
        *(("full", ep) for ep in (1, 2, 4, 8)),
        *(("none", 16), ("full", 16)),
    ]


def test_by_default_tp_stays_in_a_node_and_cp_follows_the_longest_sample() -> None:
    sizes = replace(SIZES, num_attention_heads=64, hidden_size=4096)
    space = Space(num_gpus=64, pp=(1,))

    def tried(name: str, longest: int, **changes: int) -> set[int]:
        found = replace(space, **changes).setups(sizes, np.array([100, longest]))
        return {getattr(setups[0].layout, name) for setups in found}

    assert tried("tp", 100) == {1, 2, 4, 8}
    assert tried("tp", 100, num_gpus=6) == {1, 2}
    assert [tried("cp", longest) for longest in (16383, 16384, 10**6)] == [
        {1},
        {1, 2},
        {1, 2, 4, 8, 16},
    ]


@pytest.fixture(scope="module")
def found() -> Tuning:
    space = Space(num_gpus=4, tp=(1,), pp=(1, 2, 4))
    return tune(work(), space)


def test_budgets_begin_with_the_longest_sample(found: Tuning) -> None:
    budgets = {candidate.max_tokens_per_gpu for candidate in found.ranked}
    assert min(budgets) == LENGTHS.max()
    assert budgets <= {int(LENGTHS.max()) << k for k in range(5)}


def test_the_limit_counts_full_rows_in_flight(found: Tuning) -> None:
    limit = sorted(candidate.memory.total for candidate in found.ranked)[len(found.ranked) // 2]
    fitting = tune(work(limit), Space(num_gpus=4, tp=(1,), pp=(1, 2, 4), recompute=("none",)))
    assert fitting.ranked
    for candidate in fitting.ranked:
        layout = candidate.layout
        budget = candidate.max_tokens_per_gpu
        live = budget * layout.chunks_in_flight() / layout.vpp
        assert candidate.report.peak_live_tokens <= live
        memory = MemoryModel(sizes=SIZES).fullest_stage(layout, live_tokens=live, row_tokens=budget)
        assert candidate.memory == memory
        assert memory.total <= limit


def priced(setup: Setup) -> CostModel:
    return CostModel.from_model(
        SIZES,
        layout=setup.layout,
        flops_per_gpu=1e12,
        fixed=1e-5,
        stage_layers=setup.stage_layers,
    )


def test_uneven_splits_are_tried_too() -> None:
    """A vocabulary as costly as 1.8 layers takes layers from its chunk; pp=3 becomes legal."""
    sizes = replace(SIZES, vocab_size=8000)
    space = Space(num_gpus=3, pp=(3,), vpp=(1, 2, 8), uneven=True)
    found = [setups[0] for setups in space.setups(sizes, LENGTHS)]
    assert [(setup.layout.vpp, setup.stage_layers.num_layers) for setup in found] == [
        (1, (3, 3, 2)),
        (2, (1, 2, 2, 2, 1, 0)),
    ]
    space = Space(num_gpus=2, pp=(2,), vpp=(1,), uneven=True)
    tuning = tune(work(memory=MemoryModel(sizes=sizes), cost_of=priced), space)
    splits = {candidate.setup.stage_layers.num_layers for candidate in tuning.ranked}
    assert splits == {(4, 4), (5, 3)}
    by_split = {c.setup.stage_layers.num_layers: c for c in reversed(tuning.ranked)}
    last = by_split[(5, 3)].memory
    assert last != by_split[(4, 4)].memory
    assert tuning.num_layouts == 2


def test_a_given_split_is_the_only_one_where_it_fits() -> None:
    def given(layout: Layout) -> StageLayers | None:
        keys = LayerSplit(pipeline_model_parallel_layout="Et*3|t*5L")
        return keys.stage_layers(8, pp=2) if layout.pp == 2 else None

    space = Space(num_gpus=4, tp=(1,), pp=(1, 2, 4), vpp=(1,), given_split=given)
    found = [setups[0].stage_layers.num_layers for setups in space.setups(SIZES, LENGTHS)]
    assert found == [
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
    space = Space(
        num_gpus=8,
        tp=(1,),
        split_samples=("off", "auto"),
        context_parallel=("fixed", "dynamic"),
    )

    def work(self, **changes: object) -> Workload:
        return work(
            memory=MemoryModel(sizes=self.sizes),
            cost_of=lambda setup: CostModel.from_model(
                self.sizes, layout=setup.layout, flops_per_gpu=1e12, fixed=1e-5
            ),
            **changes,
        )

    def test_they_are_not_planned_and_the_fastest_are_those_of_a_whole_sweep(self) -> None:
        every = tune(self.work(), self.space)
        found = tune(self.work(), self.space, num_best=3)
        assert every.num_passed_over == 0
        assert found.num_passed_over > 0.3 * every.num_layouts
        fastest = [(c.layout, c.kind, c.report) for c in every.best_of_layouts[:3]]
        assert [(c.layout, c.kind, c.report) for c in found.best_of_layouts[:3]] == fastest


def test_a_budget_has_the_first_setup_that_fits() -> None:
    """Recomputation costs seconds: it is for budgets that do not fit without."""
    space = Space(num_gpus=1, recompute=("none", "full"))
    everything = tune(work(), space)
    assert {candidate.setup.recompute for candidate in everything.ranked} == {"none"}
    budgets = sorted(candidate.max_tokens_per_gpu for candidate in everything.ranked)
    largest = max(candidate.memory.total for candidate in everything.ranked)
    found = {c.max_tokens_per_gpu: c.setup.recompute for c in tune(work(largest - 1), space).ranked}
    assert found == dict.fromkeys(budgets[:-1], "none") | {budgets[-1]: "full"}
    # Where nothing fits, the least is that of full recomputation.
    nothing = tune(work(1), space)
    full = MemoryModel(sizes=replace(SIZES, recompute="full"))
    (longest, *_) = budgets
    assert nothing.least_memory == full.fullest_stage(
        Layout(), live_tokens=longest, row_tokens=longest
    )


def test_what_is_run_today_is_planned_whether_or_not_it_fits() -> None:
    layout = Layout(dp=2, tp=2, sequence_parallel=True)
    setup = Setup(layout, StageLayers.even(8, pp=1), "full")
    own = Trial(setup, Kind(), 400, Policy(search=0))
    space = Space(num_gpus=4, tp=(1,), pp=(1,))
    found = tune(work(own=own), space)
    assert isinstance(found.own, Candidate)
    assert (found.own.setup, found.own.max_tokens_per_gpu) == (setup, 400)
    assert found.own in found.ranked
    tight = tune(work(found.own.memory.total - 1, own=own), space)
    assert tight.own == found.own
    assert tight.own not in tight.ranked
    unsplit = replace(own, policy=Policy(oversize="error"), max_tokens_per_gpu=100)
    assert isinstance(tune(work(own=unsplit), space).own, PlanError)
