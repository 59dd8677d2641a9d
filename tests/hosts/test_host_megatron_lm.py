"""Megatron-LM: planned steps inside its train_step, its items as samples, its packing scheduler."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.errors import ConfigError, DataError, PlanError, ScheduleError
from megapack.hosts import megatron_lm
from megapack.hosts.megatron_lm.data import read_item
from megapack.hosts.megatron_lm.model import per_sequence
from tests.dist.spawn import checked_job, rank_reports
from tests.hosts.megatron_worker import HYBRID
from tests.hosts.rollouts import first_fit_count
from tests.hosts.steps.mamba import needs_mamba

pytestmark = pytest.mark.hosts

LAYOUTS = ("dp2", "pp2_vpp2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The worker's results, for each rank."""
    folder: Path = tmp_path_factory.mktemp("megatron_lm")
    checked_job(2, "tests.hosts.megatron_worker", [str(folder)], timeout_s=600)
    return rank_reports(folder, 2)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "objective"), [*((layout, "SFT") for layout in LAYOUTS), ("dp2", "GRPO")]
)
def test_a_planned_step_equals_the_adapters(
    found: list[dict[str, Any]], layout: str, objective: str
) -> None:
    for rank in found:
        got = rank[layout][objective]
        assert got["gradient_error"] < 1e-6
        assert got["gradient_norm"] > 1e-3
        assert got["loss"] == pytest.approx(got["expected_loss"], rel=1e-5, abs=1e-6)
        assert got["metrics"]
        # Evaluation reports the log-likelihood for every objective.
        assert got["evaluated"] == pytest.approx(rank[layout]["SFT"]["loss"], rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "case", "used"),
    [
        *((layout, "shared", ["shared_tokens"]) for layout in LAYOUTS),
        ("dp2", "wide", ["wide_tokens"]),
        ("pp2_vpp2", "ordered", ["num_pieces", "num_split_backwards"]),
    ],
)
@pytest.mark.parametrize("model", ["", pytest.param(HYBRID, marks=needs_mamba)])
def test_a_planned_step_with_a_freedom_has_the_same_gradients(
    found: list[dict[str, Any]], layout: str, case: str, used: list[str], model: str
) -> None:
    for rank in found:
        got = rank[model + layout][case]
        assert all(got[name] > 0 for name in used)
        assert got["gradient_error"] < 1e-5
        assert got["loss_error"] < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exhausted_data_raises_on_every_rank(found: list[dict[str, Any]], layout: str) -> None:
    (error,) = {rank[layout]["refused"] for rank in found}
    assert "the data ended within a step of 4 items" in error


@pytest.mark.dist
def test_a_rank_that_fails_before_planning_fails_all_ranks(found: list[dict[str, Any]]) -> None:
    says = "rank 1 failed in planned step 1, plan: ValueError: no sample fits"
    assert [rank["fails_alone"] for rank in found] == [says] * 2


def test_a_planned_step_without_the_patch_is_refused() -> None:
    step = megatron_lm.PlannedStep(max_tokens_per_gpu=64)
    with pytest.raises(ScheduleError, match=r"patching.apply"):
        step(iter(()), None, return_schedule_plan=True)


def test_other_forward_steps_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def schedule(**step: Any) -> str:
        calls.append(step)
        return "theirs"

    core = types.ModuleType("megatron.core.pipeline_parallel")
    core.get_forward_backward_func = lambda *args: schedule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", core)
    run = megatron_lm.get_forward_backward_func(2)
    assert run(forward_step_func=print, num_microbatches=3, seq_length=8) == "theirs"
    assert calls == [{"forward_step_func": print, "num_microbatches": 3, "seq_length": 8}]
    planned = megatron_lm.PlannedStep(max_tokens_per_gpu=64)
    with pytest.raises(ConfigError, match="Megatron-LM passes force_all_reduce"):
        run(forward_step_func=planned, num_microbatches=3, force_all_reduce=True)


def item(**changes: Any) -> dict[str, Any]:
    """Tokens 1 2 3 4 5 6 and the last label 7; the labels 3, 4 and 6 have a loss."""
    base = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5, 6]]),
        "labels": torch.tensor([[2, 3, 4, 5, 6, 7]]),
        "loss_mask": torch.tensor([[0.0, 1, 1, 0, 1, 0]]),
    }
    return {**base, **changes}


def test_an_item_becomes_a_sample_without_its_tail() -> None:
    (sample,) = read_item(item(value=torch.arange(6)[None]), ["value"])
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert sample["response_mask"].tolist() == [False, False, True, True, False, True]
    assert sample["value"].tolist() == [0, 0, 1, 2, 3, 4]


def test_packed_items_are_cut_into_samples() -> None:
    packed = item(
        tokens=torch.tensor([1, 2, 3, 11, 12, 0]),
        labels=torch.tensor([2, 3, -100, 12, 13, 0]),
        loss_mask=torch.tensor([1, 1, 0, 0, 1, 0]),
        position_ids=torch.tensor([0, 1, 2, 0, 1, 2]),
        cu_seqlens=torch.tensor([[0, 3, 6, 6, 6]]),
    )
    first, second = read_item(packed)
    assert (first["tokens"].tolist(), second["tokens"].tolist()) == ([1, 2, 3], [11, 12, 13])
    assert second["response_mask"].tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": None}, "no labels; its keys are tokens"),
        ({"loss_mask": torch.full((1, 6), 0.5)}, "other values than 0 and 1"),
        ({"labels": torch.tensor([[2, 9, 4, 5, 6, 7]])}, "not the next tokens"),
        ({"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6]])}, "not 0 to 4 but end with 5"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "leaves loss tokens out"),
    ],
)
def test_bad_items_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_item(item(**changes))


def causal_mask(*documents: int) -> torch.Tensor:
    """True where a token does not see another, [1, 1, S, S]: those of other documents and later."""
    seen = torch.block_diag(*(torch.ones(n, n).tril() for n in documents))
    return seen[None, None] == 0


@pytest.mark.parametrize("masked", [True, False])
def test_rows_are_cut_where_positions_start_again(masked: bool) -> None:
    mask = {"attention_mask": causal_mask(3, 3)} if masked else {}
    first, second = read_item(item(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), **mask))
    # The label of a document's last token is the next document's first token.
    assert (first["tokens"].tolist(), second["tokens"].tolist()) == ([1, 2, 3, 4], [4, 5, 6])
    assert first["response_mask"].tolist() == [False, False, True, True]
    assert second["response_mask"].tolist() == [False, False, True]


def test_each_row_of_an_item_has_documents_of_its_own() -> None:
    two = {name: values.repeat(2, 1) for name, values in item().items()}
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]])
    mask = torch.cat([causal_mask(6), causal_mask(2, 3, 1)])
    samples = read_item({**two, "position_ids": positions, "attention_mask": mask})
    assert [len(sample["tokens"]) for sample in samples] == [6, 3, 4, 2]


@pytest.mark.parametrize(
    ("positions", "documents"), [([0, 1, 2, 0, 1, 2], (6,)), ([0, 1, 2, 3, 4, 5], (3, 3))]
)
def test_one_reset_without_the_other_is_refused(
    positions: list[int], documents: tuple[int, ...]
) -> None:
    bad = item(position_ids=torch.tensor([positions]), attention_mask=causal_mask(*documents))
    with pytest.raises(DataError, match=r"set --reset-position-ids and\n?.*together, or neither"):
        read_item(bad)


def test_the_balance_of_experts_can_be_that_of_each_sample() -> None:
    assert per_sequence("aux_loss") == per_sequence("global_aux_loss") == "seq_aux_loss"
    assert per_sequence("none") == "none"
    assert per_sequence(["global_aux_loss", "sinkhorn"]) == ["seq_aux_loss", "sinkhorn"]
    with pytest.raises(ConfigError, match="keep one of them"):
        per_sequence(["aux_loss", "seq_aux_loss"])
    with pytest.raises(ConfigError, match="set 'as_set' or 'per_sequence'"):
        megatron_lm.PlannedStep(max_tokens_per_gpu=64, aux_loss="each")  # type: ignore[arg-type]


def scheduler_of(cp: int, dp: int, group: int | None) -> Any:
    """What Megatron-LM's scheduler has been made with, 64 tokens per GPU."""
    return types.SimpleNamespace(
        max_seqlen_per_dp_cp_rank=64,
        cp_size=cp,
        dp_size=dp,
        microbatch_group_size_per_vp_stage=group,
    )


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 16).map(lambda n: 4 * n), min_size=1, max_size=40),
    dp=st.integers(1, 4),
    cp=st.sampled_from([1, 2]),
    group=st.sampled_from([None, 2, 3]),
)
def test_packs_have_every_sample_within_the_budget(
    lengths: list[int], dp: int, cp: int, group: int | None
) -> None:
    scheduler = scheduler_of(cp, dp, group)
    ids = [(100 + i, length) for i, length in enumerate(lengths)]
    multiple = dp * (group or 1)
    reachable = len(lengths) // multiple * multiple
    if first_fit_count(sorted(lengths, reverse=True), 64 * cp) > reachable:
        return
    groups = megatron_lm.get_groups_and_subsamples(scheduler, ids)
    assert len(groups) % (group or 1) == 0
    for ranks in groups:
        assert len(ranks) == dp * cp
        assert all(ranks[j] == ranks[j // cp * cp] for j in range(dp * cp))
    packs = [ranks[r * cp] for ranks in groups for r in range(dp)]
    assert sorted(i for pack in packs for i in pack) == [i for i, _ in ids]
    length_of = dict(ids)
    assert all(0 < sum(length_of[i] for i in pack) <= 64 * cp for pack in packs)


def test_too_few_samples_are_refused() -> None:
    scheduler = scheduler_of(1, 4, 2)
    with pytest.raises(PlanError, match="7"):
        megatron_lm.get_groups_and_subsamples(scheduler, [(i, 4) for i in range(7)])


def test_an_oversized_first_sample_makes_no_empty_pack() -> None:
    scheduler = scheduler_of(1, 2, None)
    groups = megatron_lm.get_groups_and_subsamples(scheduler, [(0, 100), (1, 10), (2, 10), (3, 10)])
    assert all(pack for ranks in groups for pack in ranks)
