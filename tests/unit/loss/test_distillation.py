"""Divergences from a teacher's most likely ids, against those of whole distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, DataError
from megapack.layout import Layout
from megapack.loss import Distillation
from megapack.loss.sequence import call_objective
from megapack.rows.segments import no_segments
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

R, V, K = 6, 11, 4
GENERATOR = torch.Generator().manual_seed(5)
MODEL = torch.randn(R, V, generator=GENERATOR)
TEACHER = (torch.randn(R, V, generator=GENERATOR) * 2).log_softmax(1)
LABELS = torch.randint(0, V, (R,), generator=GENERATOR)


def found(k: int, **settings: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Losses, metrics, and the gradient of the summed loss with respect to the logits."""
    logits = MODEL.clone().requires_grad_()
    log_p = logits.log_softmax(1)
    top, ids = TEACHER.topk(k, dim=1)
    values = log_p.gather(1, torch.cat([LABELS[:, None], ids], 1))
    fields = {"teacher_topk_ids": ids, "teacher_topk_logprobs": top}
    loss, metrics = call_objective(Distillation(**settings), values, None, fields, no_segments(()))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), metrics, gradient


def whole(
    reverse: float, model: Tensor = MODEL, teacher: Tensor = TEACHER
) -> tuple[Tensor, Tensor]:
    """The divergence over all ids, and its gradient."""
    logits = model.clone().requires_grad_()
    log_q = logits.log_softmax(1)
    forward = torch.nn.functional.kl_div(log_q, teacher, log_target=True, reduction="none").sum(1)
    back = torch.nn.functional.kl_div(teacher, log_q, log_target=True, reduction="none").sum(1)
    loss = (1 - reverse) * forward + reverse * back
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


@pytest.mark.parametrize("tail", ["lump", "ignore", "renormalize"])
@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
def test_over_all_ids_it_is_the_divergence(reverse: float, tail: str) -> None:
    loss, _, gradient = found(V, reverse_weight=reverse, tail=tail)
    expected, expected_gradient = whole(reverse)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reverse", [0.0, 1.0])
def test_lumped_ids_are_one_id(reverse: float) -> None:
    loss, metrics, _ = found(K, reverse_weight=reverse)
    p, ids = TEACHER.exp().topk(K, dim=1)
    q = MODEL.softmax(1).gather(1, ids)
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    if reverse:
        p, q = q, p
    torch.testing.assert_close(loss, (p * (p / q).log()).sum(1), atol=1e-5, rtol=1e-5)
    # Merging ids never makes two distributions easier to tell apart.
    assert (loss >= 0).all()
    assert (loss <= whole(reverse)[0] + 1e-6).all()
    assert (metrics["teacher_mass"] < 1).all()


def test_ignored_and_renormalized_ids_by_hand() -> None:
    p, ids = TEACHER.exp().topk(K, dim=1)
    q = MODEL.softmax(1).gather(1, ids)
    loss, metrics, _ = found(K, tail="ignore", sft_coef=0.5)
    nll = -MODEL.log_softmax(1).gather(1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(loss, (p * (p / q).log()).sum(1) + 0.5 * nll)
    torch.testing.assert_close(metrics["nll"], nll)
    torch.testing.assert_close(metrics["student_mass"], q.sum(1))
    loss, _, _ = found(K, tail="renormalize")
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    torch.testing.assert_close(loss, (p * (p / q).log()).sum(1))


def test_fields_of_other_shapes_are_refused() -> None:
    good = {
        "teacher_topk_ids": [torch.ones(2, 3, dtype=torch.int64)] * 2,
        "teacher_topk_logprobs": [torch.zeros(2, 3)] * 2,
    }
    plan = build_dp_schedule([4, 4], layout=Layout(), max_tokens_per_gpu=16)

    def check(**changes: Any) -> None:
        batch = SampleBatch([[1, 2, 3, 4]] * 2, {**good, **changes})
        Distillation().check(batch, plan, 0)

    check()
    check(
        **{name: [values[0], torch.zeros(())] for name, values in good.items()}
        | {"teacher_topk_ids": [good["teacher_topk_ids"][0], torch.zeros((), dtype=torch.int64)]}
    )
    for changes in (
        {"teacher_topk_logprobs": [torch.zeros(2, 2)] * 2},
        {"teacher_topk_ids": [torch.ones(2, dtype=torch.int64)] * 2},
        {"teacher_topk_ids": [torch.ones(2, 3)] * 2},
    ):
        with pytest.raises(DataError, match="of one shape"):
            check(**changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tail": "cut"}, "unknown tail 'cut'"),
        ({"reverse_weight": 1.5}, "reverse_weight=1.5"),
        ({"sft_coef": -1.0}, "sft_coef=-1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Distillation(**settings)
