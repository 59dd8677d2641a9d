"""Rows that are made in a special way equal one unpadded sample at a time, and plain rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows import row_cases
from tests.dist.rows.row_case import peak_live_tokens, row_facts
from tests.dist.rows.row_cases import ALL_CASES, HYBRID, STREAMS
from tests.dist.rows.row_problem import KINDS, PRECISE

pytestmark = pytest.mark.dist

Results = dict[str, dict[str, dict[str, Any]]]

# Models with tests of their own.
APART = {*HYBRID, *STREAMS}
TESTED = [name for name in row_cases.TESTED if name not in APART]
# Of each freedom some layouts, and one case that must fail, run before a change is taken.
WEEKLY_CASES = {
    *(f"prefixes/tp2_sp-none-{kind}" for kind in ("sft", "grpo", "gspo")),
    *(f"prefixes/cp2-none-{kind}" for kind in ("sft", "grpo")),
    "prefixes/mla_cp2-grpo",
    "prefixes/moe_replay_pp2",
    *("prefixes/sft_all", "prefixes/padding", "prefixes/no windows", "prefixes/no sinks"),
    *("wide/mla", "wide/prefixes_mtp_cp2", "wide/prefixes_dsa_full"),
    *("split/pp2_vpp2-none", "split/tp2_sp_pp2-none", "split/mla_full", "split/value"),
    *("split/no carried keys", "split/no losses of a piece", "split/over_two_pp2_vpp2_later"),
    *("split/over two, no carried keys", "split/over two, no exchanged keys"),
    *(f"split/over_two_of_dp4_later_full-{kind}" for kind in ("sft", "grpo")),
    *("split/family, no carried gradients", "split/family, no carried keys"),
    *("split/wide, no carried gradients", "split/dsa, all keys are chosen"),
    *("split/shared_cp2_pp2-full", "split/moe_bias_dp2_selective", "split/moe_replay_dp2_full"),
    *("prefixes/dsa_cp2", "wide/others", "split/wide_pp2_vpp2_later", "split/window_cp2_pp2"),
    *("split/family_moe_replay_full", "split/planned_moe_dp2"),
    *("split/wide_moe", "split/family_cp2_pp2-full", "split/family_dsa_full", "wide/moe_bias"),
    *("split/teacher_cp2", "split/selective", "prefixes/moe"),
    # Cases of several objectives run two of them.
    *("wide/mla_ends_alone", "split/mla_ends_alone"),
    *(f"prefixes/pp2_vpp2-full-{kind}" for kind in ("sft", "gspo", "value")),
    *(f"prefixes/dp2_ep2-full-{kind}" for kind in ("grpo", "gspo", "dpo")),
    *(f"prefixes/teacher-{kind}" for kind in ("distill_reverse", "teacher_kl")),
    *("split/cp2_pp2-full-sft", "wide/dp2_pp2_vpp2-full-sft"),
    *(f"split/family_pp2_vpp2-none-{kind}" for kind in ("grpo", "gspo")),
    # The loss of the other objective comes from the same rows.
    *("wide/planned_weights-grpo", "split/shared_moe-grpo", "prefixes/window_tp2_sp-sft"),
    *("wide/prefixes_moe_bias_tp2_sp_full-sft", "prefixes/teacher-tis_sequence"),
}
EVERY = [(n, k) for n in TESTED for k in ALL_CASES[n].kinds if not ALL_CASES[n].mutation]
ROUNDED = [(name, kind) for name, kind in EVERY if ALL_CASES[name].model in PRECISE]
EXACT = [cell for cell in EVERY if cell not in ROUNDED]
EXPERTS = [(name, kind) for name, kind in EVERY if ALL_CASES[name].has_experts(kind)]
MUTATED = [(n, k) for n in TESTED for k in ALL_CASES[n].kinds if ALL_CASES[n].mutation]


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_loss_and_gradients_equal_the_one_sample_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    # Margins of rewards do not depend on the last norm's bias. Its gradient is 0, so a relative
    # error means nothing.
    assert kind == "reward" or result["worst_parameter"] < 3e-5


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_outputs_equal_the_one_sample_reference(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    if KINDS[kind].value_head:
        assert result["output_error"] < 1e-5
    else:
        assert result["num_logprobs"] > 10
        assert result["logprob_mean_error"] < 1e-5
        assert result["logprob_max_error"] < 3e-5


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_forward_outputs_of_the_plan_are_those_of_training_bit_by_bit(
    name: str, kind: str, results: Results
) -> None:
    assert results[name][kind]["square_to_forward"] == 0


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_loss_and_metrics_are_those_of_plain_rows(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-5)
    # SFT on a dense model without multi-token prediction has none.
    assert result["metrics"] or kind.startswith("sft")
    # DPO's margins are sums over responses, of about 20 log-probs.
    assert result["metrics"] == pytest.approx(result["plain_metrics"], rel=1e-4, abs=1e-6)
    for metric, value in result["expected_metrics"].items():
        assert value > 0.01
        assert result["metrics"][metric] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), EXPERTS)
def test_experts_are_counted_recorded_and_replayed_as_in_the_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["wrong_choices"] == 0
    assert result["replay_error"] < 1e-5
    if ALL_CASES[name].model == "moe_bias":
        assert result["num_biases"] > 4
        assert result["wrong_biases"] == 0


@pytest.mark.parametrize(("name", "kind"), ROUNDED)
def test_rows_add_little_to_the_error_of_bf16(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    assert 0 < result["gradient_error"] < 2 * result["one_sample_gradient_error"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-2)
    assert result["logprob_mean_error"] < 0.02


@pytest.mark.parametrize(("name", "kind"), MUTATED)
def test_what_a_mutated_case_forgets_is_seen(name: str, kind: str, results: Results) -> None:
    assert results[name][kind]["gradient_error"] > 1e-2


@pytest.mark.parametrize("name", [name for name in ALL_CASES if name not in APART])
def test_plans_have_what_the_case_is_about(name: str) -> None:
    case = ALL_CASES[name]
    layout = case.layout
    # Objectives on the same samples have the same plans.
    kinds = {(case.shape_of(kind), kind == "sft_all"): kind for kind in case.kinds}
    for kind in kinds.values():
        samples = case.samples_of(kind)
        plan, plain = case.plans(samples)
        facts = row_facts(samples, plan)
        for fact, value in case.expected(samples.shape).items():
            assert facts[fact] >= value if isinstance(value, int) else facts[fact] == value, fact
        assert case.shares or not facts["shared_tokens"]
        is_split = case.lag is not None or case.policy.backward == "split"
        assert is_split == (facts["weight_operations"] > 0)

        gpus = [layout.cp * width for width in layout.widths]
        by_hand = case.made_rows(samples.shape) is not None
        if plan.policy.context_parallel == "fixed":
            gpus = gpus[:1]
        elif not by_hand:
            assert facts["gpus"][-1] > layout.cp
            gpus = sorted({*facts["gpus"], gpus[-1]})
        assert facts["gpus"] == case.expected(samples.shape).get("gpus", gpus)
        if by_hand and case.shares:
            assert all(facts[f"shared_{gpu // layout.cp}"] for gpu in gpus)

        if facts["chains"] and by_hand:
            assert facts["longest_row"] < max(samples.batch.lengths)
            # A stage holds the longest chain, and what runs ahead of the backwards.
            ahead = layout.pp - 1
            if layout.vpp > 1:
                ahead = 2 * ahead + layout.vpp * layout.group_size
            window = max(facts["chains"]) + ahead + (case.lag or 0)
            assert peak_live_tokens(plan) <= window * facts["longest_row"]

        bare = row_facts(samples, plain)
        assert bare["gpus"] == [layout.cp]
        assert not any(bare[fact] for fact in ("shared_tokens", "pieces", "weight_operations"))


def test_a_deep_pipeline_holds_fewer_tokens_than_with_whole_samples() -> None:
    case = ALL_CASES["split/pp4-none"]
    assert case.layout.pp == 4
    plan, plain = case.plans(case.samples_of("sft"))
    assert peak_live_tokens(plan) < peak_live_tokens(plain)
