"""The rows of a chain have the losses, metrics and gradients of one row with the whole samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.layout import Layout
from megapack.loss.sequence import ValueLoss, call_objective
from megapack.loss.token import SFT, AnyObjective
from megapack.plan import MicroBatch, Part
from megapack.rows.chain import Chain, Link, link_rows
from megapack.rows.packed import PackedRow, PlacedRow
from megapack.rows.packing import pack_row
from megapack.rows.segments import Segments, chain_segments, row_segments
from megapack.samples import SampleBatch
from megapack.schedule.chains import ChainLosses, LossInputs, joined

pytestmark = pytest.mark.unit

LENGTHS = [12, 4, 5]
ROWS: list[tuple[tuple[int, ...], tuple[int, int] | None]] = [
    ((0, 2), (0, 4)),
    ((0,), (4, 8)),
    ((0, 1), (8, 12)),
]
WHOLE = ((0, 1, 2), None)


def batch() -> SampleBatch:
    generator = torch.Generator().manual_seed(1)

    def noise() -> list[Tensor]:
        return [torch.randn(n, generator=generator) for n in LENGTHS]

    fields = {
        "advantages": list(torch.randn(len(LENGTHS), generator=generator)),
        "old_logprobs": noise(),
        "ref_logprobs": noise(),
        "returns": noise(),
    }
    return SampleBatch([list(range(n)) for n in LENGTHS], fields)


def row_of(samples: tuple[int, ...], piece: tuple[int, int] | None) -> PackedRow:
    held = [LENGTHS[i] for i in samples]
    if piece is not None:
        held[0] = piece[1] - piece[0]
    tokens = sum(held)
    pieces = () if piece is None else (Part(samples[0], *piece),)
    micro_batch = MicroBatch(samples, tokens, tokens, 0, tokens, pieces=pieces)
    return pack_row(batch(), micro_batch, Layout(), [0.3, 0.5, 0.2])


def links(rows: list[PackedRow]) -> list[Link]:
    return [link for link in link_rows(rows, keeps_gradients=True) if link is not None]


class Run:
    """An objective on rows, whose values are leaves: one per token of each sample."""

    def __init__(self, objective: AnyObjective, *, with_scores: bool = False) -> None:
        self.objective = objective
        generator = torch.Generator().manual_seed(2)
        self.values = torch.randn(sum(LENGTHS), generator=generator).requires_grad_()
        self.entropies = torch.rand(sum(LENGTHS), generator=generator).requires_grad_()
        self.scores = torch.randn(len(LENGTHS), generator=generator).requires_grad_()
        self.with_scores = with_scores
        self.calls: list[LossInputs] = []
        self.metrics: dict[str, float] = {}

    def inputs(self, row: PackedRow) -> LossInputs:
        firsts = torch.tensor([sum(LENGTHS[:i]) for i in range(len(LENGTHS))])
        own = torch.cat([torch.arange(LENGTHS[i]) + firsts[i] for i in row.samples])
        labels_R = own[row.losses.label_index_R]
        scores_n = None
        if self.with_scores:
            has_end_n = torch.zeros(len(row.samples)).index_fill(0, row.end_samples_E, 1.0)
            scores_n = self.scores[list(row.samples)] * has_end_n
        return LossInputs(
            values_R=self.values[labels_R] * 1.0,
            entropy_R=None if self.with_scores else self.entropies[labels_R] * 1.0,
            fields=row.losses.fields,
            weights_R=row.losses.weights_R,
            segments=row_segments(PlacedRow.of(row, params=None), scores_n=scores_n),
        )

    def loss(self, inputs: LossInputs) -> Tensor:
        self.calls.append(inputs)
        losses_R, metrics = call_objective(
            self.objective, inputs.values_R, inputs.entropy_R, inputs.fields, inputs.segments
        )
        for name, values_R in metrics.items():
            own = float((inputs.weights_R * values_R.detach()).sum())
            self.metrics[name] = self.metrics.get(name, 0.0) + own
        return (inputs.weights_R * losses_R).sum()

    def grads(self) -> list[Tensor | None]:
        return [x.grad for x in (self.values, self.entropies, self.scores)]


def run_chain(run: Run, scale: float = 1.0) -> float:
    """Forwards of the rows in order, backwards in reverse; the sum of the forwards' results."""
    chains = ChainLosses(run.loss)
    rows = [row_of(*row) for row in ROWS]
    totals = [
        chains.add(link, run.inputs(row)) for link, row in zip(links(rows), rows, strict=True)
    ]
    for total in reversed(totals):
        (total * scale).backward()
    return float(sum(total.detach() for total in totals))


class ScoreLoss:
    """Half the squared score of each sample, at each of its tokens."""

    reads = "values"
    needs_entropy = False
    needs_segments = True
    required_fields = ()

    def __call__(
        self,
        values_R: Tensor,
        entropy_R: Tensor | None,
        fields: Mapping[str, Tensor],
        segments: Segments,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert segments.scores_n is not None
        return segments.spread(segments.scores_n.square() / 2) + 0 * values_R, {}


@pytest.mark.parametrize("objective", [ScoreLoss(), ValueLoss()])
def test_values_and_scores_of_a_value_head(objective: Any) -> None:
    one = Run(objective, with_scores=True)
    one.loss(one.inputs(row_of(*WHOLE))).backward()
    run = Run(objective, with_scores=True)
    run_chain(run)
    torch.testing.assert_close(run.values.grad, one.values.grad)
    if isinstance(objective, ScoreLoss):
        torch.testing.assert_close(run.scores.grad, one.scores.grad)


def test_losses_of_the_joined_row_are_in_the_order_of_samples() -> None:
    run = Run(SFT())
    rows = [row_of(*row) for row in ROWS]
    row = joined([run.inputs(row) for row in rows], links(rows))
    # Samples 0, 2 and 1 have 11, 4 and 3 losses.
    assert row.segments.sample_of_R.tolist() == [0] * 11 + [1] * 4 + [2] * 3
    expected = torch.cat([run.values[1:12], run.values[17:21], run.values[13:16]])
    torch.testing.assert_close(row.values_R, expected)
    assert row.segments.set_of_n.tolist() == [0, 1, 2]


def test_sets_and_fields_of_joined_rows() -> None:
    """Samples 0 to 2 are in the first row; 0 and 2 are a set, as are 3 and 4."""
    rows = [((0, 1, 2), [0, 1, 0]), ((2, 0), [0, 0]), ((1, 3, 4), [0, 1, 1])]
    chain = Chain((), num_samples=5, keeps_gradients=False)
    links = [Link(chain, k, torch.tensor(samples)) for k, (samples, _) in enumerate(rows)]
    segments = [
        Segments(
            sample_of_R=torch.tensor([0, len(samples) - 1]),
            set_of_n=torch.tensor(sets),
            fields={"number": torch.tensor(samples) + 0.5},
            scores_n=torch.tensor(samples) * (samples[0] > 0) + 0.0,
        )
        for samples, sets in rows
    ]
    found = chain_segments(segments, links)
    assert found.sample_of_R.tolist() == [0, 2, 2, 0, 1, 4]
    assert found.set_of_n.tolist() == [0, 1, 0, 3, 3]
    assert found.fields["number"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert found.scores_n is not None
    assert found.scores_n.tolist() == [0, 1, 2, 3, 4]


def test_two_chains_at_a_time_and_a_nan() -> None:
    run = Run(SFT())
    chains = ChainLosses(run.loss)
    first, second, last = rows = [row_of(*row) for row in ROWS]
    begin, middle, end = links(rows)
    parts = (Part(1, 0, 2), Part(1, 2, 4))
    micro_batches = [MicroBatch((1,), 2, 2, 0, 2, pieces=(part,)) for part in parts]
    others = [pack_row(batch(), mb, Layout(), [0.3, 0.5, 0.2]) for mb in micro_batches]
    chains.add(begin, run.inputs(first))
    chains.add(links(others)[0], run.inputs(others[0]))
    with torch.no_grad():
        run.values[5] = float("nan")
    # The row that has the NaN is the one that shows it.
    assert chains.add(middle, run.inputs(second)).isnan()
    assert run.calls == []
    chains.add(end, run.inputs(last))
    assert len(run.calls) == 1
