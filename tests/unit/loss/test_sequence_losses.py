from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack import ConfigError, DataError, Layout, build_dp_schedule
from megapack.loss import DPO, GRPO, GSPO, PairwiseReward, ValueLoss, pair_signs
from megapack.loss.sequence import call_objective
from megapack.rows.segments import Segments
from megapack.samples import SampleBatch
from megapack.schedule.checks import check_entropy, check_objective

pytestmark = pytest.mark.unit

SAMPLE_OF = torch.tensor([0, 0, 1, 1, 1])
OLD = torch.tensor([-1.0, -2.0, -3.0, -1.5, -0.5])
NEW = OLD + torch.tensor([0.3, -0.1, 0.2, 0.25, -0.7])
REF = OLD - torch.tensor([0.05, 0.4, -0.3, 0.1, 0.2])
ADVANTAGES = torch.tensor([1.5, 1.5, -0.5, -0.5, -0.5])


def segments(**more: Any) -> Segments:
    return Segments(sample_of_R=SAMPLE_OF, set_of_n=torch.tensor([0, 0]), **more)


def losses(objective: Any, logp: Tensor, **fields: Tensor) -> Tensor:
    known = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF, **fields}
    return call_objective(objective, logp, None, known, segments())[0]


def test_gspo_clips_one_ratio_per_sample() -> None:
    ratios = [math.exp((0.3 - 0.1) / 2), math.exp((0.2 + 0.25 - 0.7) / 3)]
    found = losses(GSPO(clip_low=0.01, clip_high=0.05), NEW)
    # Sample 0 is above 1.05 with a positive advantage, sample 1 below 0.99 with a negative one.
    assert ratios[0] > 1.05
    assert ratios[1] < 0.99
    assert found.tolist() == pytest.approx([-1.5 * 1.05] * 2 + [0.5 * 0.99] * 3)
    assert losses(GSPO(clip_low=0.9, clip_high=9.0), NEW).tolist() == pytest.approx(
        [-1.5 * ratios[0]] * 2 + [0.5 * ratios[1]] * 3
    )


def test_options_out_of_range_are_refused() -> None:
    for make in (
        lambda: GSPO(kl_level="row"),  # type: ignore[arg-type]
        lambda: ValueLoss(clip=0.0),
        lambda: DPO(beta=0.0),
        lambda: DPO(label_smoothing=0.5),
    ):
        with pytest.raises(ConfigError):
            make()


def test_the_value_loss_is_the_larger_of_both_errors() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    fields = {
        "returns": torch.tensor([1.5, 1.5, 0.0]),
        "old_values": torch.tensor([0.0, 2.1, 3.4]),
    }
    loss, metrics = ValueLoss(clip=0.5)(values, None, fields)
    assert loss.tolist() == pytest.approx([0.5 * 1.0**2, 0.5 * 0.5**2, 0.5 * 3.0**2])
    assert metrics["value_clip_fraction"].tolist() == [1, 0, 0]
    plain, _ = ValueLoss()(values, None, fields)
    assert plain.tolist() == pytest.approx([0.125, 0.125, 4.5])
    assert ValueLoss().required_fields == ("returns",)


def test_dpo_is_the_formula_of_the_margin() -> None:
    signs = {"pair_sign": torch.tensor([-1.0, 1.0])}
    gains = [float((NEW - REF)[:2].sum()), float((NEW - REF)[2:].sum())]
    margin = gains[1] - gains[0]
    found, metrics = DPO(beta=0.5, label_smoothing=0.1)(
        NEW, None, {"ref_logprobs": REF}, segments(fields=signs)
    )
    right, wrong = (math.log1p(math.exp(-sign * 0.5 * margin)) for sign in (1, -1))
    assert found.tolist() == pytest.approx([0.9 * right + 0.1 * wrong] * 5)
    assert metrics["margin"].tolist() == pytest.approx([margin] * 5)
    assert metrics["preferred_fraction"].tolist() == [float(margin > 0)] * 5
    # The second sample is the preferred one; all positions have the rewards of both.
    assert metrics["preferred_reward"].tolist() == pytest.approx([0.5 * gains[1]] * 5)
    assert metrics["other_reward"].tolist() == pytest.approx([0.5 * gains[0]] * 5)


def test_dpo_accepts_reference_sums_per_sample() -> None:
    signs = {"pair_sign": torch.tensor([-1.0, 1.0])}
    sums = {"ref_logprobs": segments().sum(REF)}
    spread = {"ref_logprobs": segments().spread(sums["ref_logprobs"])}
    found, _ = DPO()(NEW, None, spread, segments(fields={**signs, **sums}))
    wanted, _ = DPO()(NEW, None, {"ref_logprobs": REF}, segments(fields=signs))
    torch.testing.assert_close(found, wanted)


def check(objective: Any, signs: list[Any], ids: Any, masks: Any = None, ref: Any = 0.0) -> None:
    refs = [ref] + [0.0] * (len(signs) - 1)
    masked = {"response_mask": masks} if masks else {}
    fields = {"pair_sign": signs, "ref_logprobs": refs, **masked}
    batch = SampleBatch([[1, 2, 3]] * len(signs), fields)
    plan = build_dp_schedule(
        batch.lengths, layout=Layout(), max_tokens_per_gpu=64, colocate_ids=ids
    )
    objective.check(batch, plan, 0)


def test_colocated_sets_that_are_not_pairs_are_refused() -> None:
    check(DPO(), [1, -1, -1, 1], ["a", "a", "b", "b"])
    with pytest.raises(DataError, match="plan with colocate_ids"):
        check(DPO(), [1, -1], None)
    with pytest.raises(DataError, match=r"'b' holds samples .2, 3."):
        check(PairwiseReward(), [1, -1, 1, 1], ["a", "a", "b", "b"])
    with pytest.raises(DataError, match=r"'a' holds samples .0, 1, 2."):
        check(DPO(), [1, -1, -1], ["a"] * 3)
    with pytest.raises(DataError, match="one number for some samples"):
        check(DPO(), [1, -1], [5, 5], ref=[0.0, 1.0])
    with pytest.raises(DataError, match="sample 1 of the pair 5 has no response token"):
        check(DPO(), [1, -1], [5, 5], [[0, 1, 1], [1, 0, 0]])


def test_pair_signs_are_of_all_samples() -> None:
    with pytest.raises(DataError, match="2 pairs do not name each of 5"):
        pair_signs([(0, 1), (2, 3)], 5)


def test_an_objective_for_another_head_is_refused() -> None:
    check_objective(GRPO(), "vocabulary")
    check_objective(ValueLoss(), "value")
    with pytest.raises(ConfigError, match="GRPO reads logprobs, a value head gives values"):
        check_objective(GRPO(), "value")
    with pytest.raises(ConfigError, match="a value head has no entropy"):
        check_entropy(True, "value")
    signs = {"pair_sign": torch.tensor([1.0, -1.0])}
    with pytest.raises(ConfigError, match="value head"):
        PairwiseReward()(torch.zeros(5), None, {}, segments(fields=signs))
    with pytest.raises(ConfigError, match="ValueLoss reads values"):
        check_objective(ValueLoss(), "vocabulary")


def test_rounding_does_not_count_as_clipping() -> None:
    values, old = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (old + (values - old) != values).any()
    fields = {"returns": torch.zeros(1000), "old_values": old}
    _, metrics = ValueLoss(clip=10.0)(values, None, fields)
    assert metrics["value_clip_fraction"].sum() == 0
