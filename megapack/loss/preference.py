"""Losses of pairs of samples, one of them preferred. The plan keeps a pair in one micro-batch.

    pair_of_sample, signs = pair_signs(pairs, len(batch))
    plan = build_dp_schedule(lengths, colocate_ids=pair_of_sample, ...)
    adapter.step(plan, batch, objective=DPO(), weighting="seq-mean-token-mean")

Every response token of both samples has the loss of its pair, so with `seq-mean-token-mean` the
step's loss is the mean over pairs.

Shape suffixes: R response positions, n samples of the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from megapack.errors import ConfigError, DataError
from megapack.loss.token import Fields, Losses
from megapack.plan.plan import Plan
from megapack.rows.segments import Segments
from megapack.samples import SampleBatch

PAIR_SIGN = "pair_sign"
"""Name of a per-sample field: 1 for the preferred sample of a pair, -1 for the other."""

# Log-probs and values of one model differ by at most this part of them between layouts and rows:
# a margin within it, as in DPO's first step, is no preference.
_ROUNDING = 1e-5


class _Pairs:
    """What both losses share: the need for segments, and the check of pairs."""

    needs_segments = True
    needs_entropy = False

    def check(self, batch: SampleBatch, plan: Plan, step: int) -> None:
        """Raise DataError unless each colocated set is a pair, both with response tokens."""
        if plan.colocate_ids is None:
            raise DataError(
                f"{type(self).__name__} needs pairs in one micro-batch; plan with colocate_ids"
            )
        pairs: dict[int | str, list[int]] = {}
        for i in plan.steps[step].kept_samples:
            pairs.setdefault(plan.colocate_ids[i], []).append(i)
        for name, samples in pairs.items():
            signs = [batch.field(PAIR_SIGN, i) for i in samples]
            if any(sign.dim() for sign in signs) or sorted(map(float, signs)) != [-1.0, 1.0]:
                raise DataError(
                    f"colocate id {name!r} holds samples {samples} with {PAIR_SIGN} "
                    f"{[sign.tolist() for sign in signs]}; give two samples the numbers 1 and -1"
                )
            empty = [i for i in samples if batch.num_loss_tokens[i] == 0]
            if empty:
                raise DataError(
                    f"sample {empty[0]} of the pair {name!r} has no response token, so the pair "
                    "would have half its weight; leave the pair out"
                )


@dataclass(frozen=True, kw_only=True)
class DPO(_Pairs):
    """The loss of direct preference optimization (arXiv 2305.18290), with label smoothing (cDPO).

        pair_of_sample, signs = pair_signs(pairs, num_samples=len(batch))
        batch.set_field("pair_sign", signs)
        plan = build_dp_schedule(
            batch.lengths, layout=layout, max_tokens_per_gpu=16384, colocate_ids=pair_of_sample
        )
        adapter.step(plan, batch, objective=DPO(), weighting="seq-mean-token-mean")

    The loss of a pair is -log sigmoid(beta * margin). A response's gain is its log-prob minus its
    log-prob under the reference; the margin is the preferred response's gain minus the other's.

    Reads:
        pair_sign: per sample 1 (preferred) or -1, as `pair_signs` gives them.
        ref_logprobs: the reference's log-probs (nats), per response token or summed per sample.

    Metrics: preferred_fraction, margin (nats), preferred_reward, other_reward (beta * gain).

    Raises:
        ConfigError: a number out of range.
    """

    required_fields = ("ref_logprobs", PAIR_SIGN)

    beta: float = 0.1
    """Factor of the margin (1 / nats), above 0."""
    label_smoothing: float = 0.0
    """Assumed probability that a pair's label is wrong, below `0.5`."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"beta={self.beta} and label_smoothing={self.label_smoothing}; set them above 0 "
                "and in [0, 0.5)"
            )

    def check(self, batch: SampleBatch, plan: Plan, step: int) -> None:
        """Check the pairs, and that reference log-probs are all per sample or all per token."""
        super().check(batch, plan, step)
        kept = plan.steps[step].kept_samples
        if len({batch.field("ref_logprobs", i).dim() for i in kept}) > 1:
            raise DataError(
                "ref_logprobs is one number for some samples and one per token for others; give "
                "the same form for all"
            )

    def __call__(
        self, logprobs_R: Tensor, entropy_R: Tensor | None, fields: Fields, segments: Segments
    ) -> Losses:
        """See `Objective`; metrics: preferred_fraction, margin (nats), and preferred_reward and
        other_reward, beta times the gain of each response."""
        exact_R = logprobs_R.double()
        if "ref_logprobs" in segments.fields:
            gain_n = segments.sum(exact_R) - segments.fields["ref_logprobs"]
        else:
            gain_n = segments.sum(exact_R - fields["ref_logprobs"])
        sign_n = segments.fields[PAIR_SIGN]
        margin_n = segments.sum_sets(sign_n * gain_n)
        right_n = logsigmoid(self.beta * margin_n)
        wrong_n = logsigmoid(-self.beta * margin_n)
        loss_n = -(1 - self.label_smoothing) * right_n - self.label_smoothing * wrong_n
        size_n = segments.sum(exact_R.detach().abs())
        loss_R, metrics = _spread(segments, loss_n, margin_n, self.beta * gain_n, size_n)
        return loss_R.to(logprobs_R.dtype), metrics


@dataclass(frozen=True, kw_only=True)
class PairwiseReward(_Pairs):
    """The Bradley-Terry loss of a reward model: -log sigmoid(preferred score - other score).

        adapter = ScheduleAdapter(chunks, layout=layout, head="value")
        adapter.step(plan, batch, objective=PairwiseReward(), weighting="seq-mean-token-mean")

    The score of a sample is the value head's value at its last token. Pairs are planned as for
    `DPO`.

    Reads:
        pair_sign: per sample 1 (preferred) or -1, as `pair_signs` gives them.

    Metrics: preferred_fraction, margin, preferred_reward, other_reward (the scores).
    """

    reads = "values"
    required_fields = (PAIR_SIGN,)

    def __call__(
        self, values_R: Tensor, entropy_R: Tensor | None, fields: Fields, segments: Segments
    ) -> Losses:
        """See `Objective`; metrics: preferred_fraction, margin, and preferred_reward and
        other_reward, the scores."""
        if segments.scores_n is None:
            raise ConfigError("PairwiseReward reads scores; give the model a value head")
        margin_n = segments.sum_sets(segments.fields[PAIR_SIGN] * segments.scores_n)
        scores_n = segments.scores_n
        return _spread(segments, -logsigmoid(margin_n), margin_n, scores_n, scores_n.abs())


def _spread(
    segments: Segments, loss_n: Tensor, margin_n: Tensor, reward_n: Tensor, size_n: Tensor
) -> Losses:
    """Losses and metrics of pairs at the response positions of both samples.

    Args:
        reward_n: of each sample; both samples of a pair report the rewards of both.
        size_n: sum of the absolute numbers that a sample's part of the margin comes from.
    """
    reward_n = reward_n.detach()
    rounding_n = _ROUNDING * segments.sum_sets(size_n.detach())
    is_preferred_n = segments.fields[PAIR_SIGN] > 0
    metrics_n = {
        "preferred_fraction": (margin_n > rounding_n).float(),
        "margin": margin_n.detach(),
        "preferred_reward": segments.sum_sets(reward_n * is_preferred_n),
        "other_reward": segments.sum_sets(reward_n * ~is_preferred_n),
    }
    metrics = {name: segments.spread(value_n) for name, value_n in metrics_n.items()}
    return segments.spread(loss_n), metrics


def pair_signs(pairs: Sequence[tuple[int, int]], num_samples: int) -> tuple[list[int], list[float]]:
    """What DPO and PairwiseReward need of pairs: ids for the plan, and signs for the batch.

    >>> pair_signs([(0, 3), (2, 1)], 4)
    ([0, 1, 1, 0], [1.0, -1.0, 1.0, -1.0])

    Args:
        pairs: sample indices (preferred, other) of each pair.
        num_samples: samples of the batch; each must be in one pair.

    Returns:
        Per sample its pair, for `colocate_ids`, and its sign, for the field `pair_sign`.

    Raises:
        DataError: a sample is in no pair or in several.
    """
    if sorted(i for pair in pairs for i in pair) != list(range(num_samples)):
        raise DataError(f"{len(pairs)} pairs do not name each of {num_samples} samples once")
    ids = [0] * num_samples
    signs = [1.0] * num_samples
    for number, (preferred, other) in enumerate(pairs):
        ids[preferred] = ids[other] = number
        signs[other] = -1.0
    return ids, signs
