"""Importance corrections by hand, and as four hosts define them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from megapack.loss import GRPO, GSPO, PPO, Correction
from megapack.loss.sequence import call_objective, metric_names
from megapack.rows.segments import Segments

pytestmark = pytest.mark.unit

SEGMENTS = Segments(sample_of_R=torch.tensor([0, 0, 1, 1, 1]), set_of_n=torch.tensor([0, 1]))
# Trainer's log-probs minus the engine's, and so the ratios of tokens: 3, 0.5, 1, 0.8, 1.5.
RATIOS = torch.tensor([3.0, 0.5, 1.0, 0.8, 1.5])
OLD = torch.tensor([-1.0, -2.0, -3.0, -1.5, -0.5])
FIELDS = {"old_logprobs": OLD, "rollout_logprobs": OLD - RATIOS.log()}
PRODUCTS = [1.5, 1.5, 1.2, 1.2, 1.2]
MEANS = [1.5 ** (1 / 2)] * 2 + [1.2 ** (1 / 3)] * 3


@pytest.mark.parametrize(
    ("settings", "expected", "num_outside"),
    [
        # TIS: slime and miles `vanilla_tis_function`, NeMo-RL "tis", verl rollout_is="token".
        ({"high": 2.0}, [2.0, 0.5, 1.0, 0.8, 1.5], 1),
        ({"low": 0.9, "high": 1.2}, [1.2, 0.9, 1.0, 0.9, 1.2], 4),
        # verl rollout_is="sequence": the product, cut.
        ({"level": "sequence", "high": 1.3}, [1.3, 1.3, 1.2, 1.2, 1.2], 2),
        # slime's mis.py, tis_level="geometric".
        ({"level": "geometric", "high": 1.1}, [1.1, 1.1, *MEANS[2:]], 2),
        # IcePop: slime and miles `icepop_function`, NeMo-RL "icepop", verl "0.5_2.0".
        ({"kind": "mask", "low": 0.5, "high": 2.0}, [0.0, 0.5, 1.0, 0.8, 1.5], 1),
        # slime's mis.py, tis_mode="mask" and tis_level="sequence".
        ({"kind": "mask", "level": "sequence", "high": 1.3}, [0.0, 0.0, *PRODUCTS[2:]], 2),
        # NeMo-RL "seq-mask-tis": weights of tokens, samples masked by their geometric mean.
        (
            {"kind": "mask", "level": "geometric", "weight_level": "token", "high": 1.1},
            [0.0, 0.0, 1.0, 0.8, 1.5],
            2,
        ),
    ],
)
def test_weights_by_hand(settings: Any, expected: list[float], num_outside: int) -> None:
    correction = Correction(**settings)
    weights, metrics = correction.weights(FIELDS, SEGMENTS)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
    level = {"sequence": PRODUCTS, "geometric": MEANS}.get(correction.level, RATIOS.tolist())
    assert metrics["engine_ratio"].tolist() == pytest.approx(level, rel=1e-5)
    assert metrics["engine_ratio_max"].max().item() == pytest.approx(max(level), rel=1e-5)
    assert metrics["engine_clip_fraction"].sum().item() == num_outside
    k3 = [ratio - 1 - math.log(ratio) for ratio in RATIOS.tolist()]
    assert metrics["kl_engine"].tolist() == pytest.approx(k3, abs=1e-6)


@pytest.mark.parametrize("kind", [PPO, GRPO, GSPO])
def test_the_weight_multiplies_the_clipped_loss_alone(kind: Any) -> None:
    more = {} if kind is PPO else {"kl_coef": 0.3}
    fields = {
        **FIELDS,
        "advantages": torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0]),
        "ref_logprobs": OLD - 0.2,
    }
    entropy = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9])

    def losses(**settings: Any) -> torch.Tensor:
        return call_objective(kind(**settings), OLD + 0.1, entropy, fields, SEGMENTS)[0]

    correction = Correction(level="sequence", high=1.3)
    weights, _ = correction.weights(fields, SEGMENTS)
    rest = losses(entropy_coef=0.1, **more) - losses()
    found = losses(correction=correction, entropy_coef=0.1, **more)
    torch.testing.assert_close(found, weights * losses() + rest)


def test_names_of_fields_and_metrics_follow_the_settings() -> None:
    plain = GRPO()
    assert plain.required_fields == ("advantages", "old_logprobs")
    assert not plain.needs_segments
    corrected = GRPO(correction=Correction(), teacher_kl_coef=1.0, kl_coef=0.1)
    read = ("advantages", "old_logprobs", "rollout_logprobs", "teacher_logprobs", "ref_logprobs")
    assert corrected.required_fields == read
    own = {"engine_ratio", "engine_ratio_max", "engine_clip_fraction", "kl_engine", "kl_teacher"}
    assert set(metric_names(corrected, False)) - set(metric_names(GRPO(kl_coef=0.1), False)) == own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cut"}, "unknown kind 'cut'"),
        ({"level": "row"}, "unknown level 'row'"),
        ({"low": 2.0}, "low=2.0 and high=2.0"),
        ({"high": math.inf}, "high=inf"),
        ({"low": -0.1}, "low=-0.1"),
        ({"weight_level": "token"}, "no effect with kind=truncate"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Correction(**settings)
