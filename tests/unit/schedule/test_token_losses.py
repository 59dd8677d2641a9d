"""The token that a loss without a value comes from is named, in rows of any kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megapack import Layout, MicroBatch, SharedPrefixes
from megapack.errors import ScheduleError
from megapack.plan import Part
from megapack.prefixes import PrefixTable
from megapack.rows.chain import link_rows
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.rows.segments import row_segments
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch
from megapack.schedule.chains import LossInputs, joined
from megapack.schedule.faults import FiniteFlags, TokenLosses
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit

IDS = [[50, 51, 52, 53, 54, 55], [70, 71], [50, 51, 52, 93]]
FIELDS = {"advantages": [1.0, 2.0, -3.0], "old_logprobs": [[-1.0] * len(ids) for ids in IDS]}


def row_of(samples: tuple[int, ...], tokens: int, layout: Layout, **more: Any) -> PlacedRow:
    pieces = more.pop("pieces", ())
    row_tokens = more.pop("row_tokens", tokens)
    micro_batch = MicroBatch(samples, row_tokens, tokens, 0, row_tokens, pieces=pieces)
    row = pack_row(SampleBatch(IDS, FIELDS), micro_batch, layout, **more)
    return PlacedRow.of(row, params=None)


def losses(row: PlacedRow, bad: dict[int, float], **more: Any) -> TokenLosses:
    """Losses of 0.5 but for those of these labels' ids."""
    ids = row.labels_T[row.losses.positions_R].tolist()
    found = torch.tensor([bad.get(one, 0.5) for one in ids])
    fields = row.losses.fields
    values = {"losses_R": found, "values_R": torch.arange(-1.0, -1.0 - len(ids), -1.0)}
    return TokenLosses(rows=[row], order_R=None, fields=fields, reads="log-prob", **(values | more))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
def test_the_token_with_the_largest_loss(value: float) -> None:
    row = row_of((2, 0), 10, Layout())
    assert losses(row, {54: value}).worst() == (
        f"token 4 of sample 0 (from 0, prompt included; id 54) has loss {value:.6g}, "
        "log-prob -7, advantages 1, old_logprobs -1"
    )


def test_of_equal_losses_the_one_furthest_from_the_old_policy() -> None:
    """Losses of a whole sample are equal at all its tokens."""
    row = row_of((0,), 6, Layout())
    far = losses(row, dict.fromkeys(IDS[0], math.inf))
    assert far.worst().startswith("token 5 of sample 0 (from 0, prompt included; id 55)")


def test_the_token_in_a_slice() -> None:
    row = pack_row(SampleBatch(IDS, FIELDS), MicroBatch((0, 2), 12, 10, 0, 12), Layout(cp=2))
    for rank in range(2):
        own = PlacedRow.of(slice_row(row, 2, rank), params=None)
        ids = own.labels_T[own.losses.positions_R].tolist()
        for sample, token in ((0, 1), (0, 4), (2, 3)):
            label = IDS[sample][token]
            if ids.count(label) == 1:
                place = f"token {token} of sample {sample} (from 0, prompt included; id {label})"
                assert losses(own, {label: math.nan}).worst().startswith(place)


def test_the_token_behind_a_shared_prefix() -> None:
    prefixes = PrefixTable(SharedPrefixes.from_samples(IDS), [*map(len, IDS)], Layout())
    row = row_of((0, 2), 10, Layout(), row_tokens=8, prefixes=prefixes)
    assert losses(row, {93: math.nan}).worst().startswith("token 3 of sample 2 ")


def test_the_token_in_a_chain() -> None:
    rows = [
        row_of((1, 0), 5, Layout(), pieces=(Part(0, 0, 3),)),
        row_of((0,), 3, Layout(), pieces=(Part(0, 3, 6),)),
    ]
    links = [link for link in link_rows(rows, keeps_gradients=True) if link is not None]
    found = [losses(row, {55: math.nan, 53: 2.0}) for row in rows]
    inputs = joined(
        [
            LossInputs(
                values_R=one.losses_R,
                entropy_R=None,
                fields=one.fields,
                weights_R=row.losses.weights_R,
                segments=row_segments(row),
                rows=[row],
            )
            for one, row in zip(found, rows, strict=True)
        ],
        links,
    )
    values = inputs.values_R
    one = TokenLosses(
        rows=inputs.rows,
        order_R=inputs.order_R,
        losses_R=values,
        values_R=values,
        fields=inputs.fields,
        reads="log-prob",
    )
    assert one.worst().startswith("token 5 of sample 0 (from 0, prompt included; id 55)")


def test_errors_name_the_token() -> None:
    row = row_of((2, 0), 10, Layout())
    flags = FiniteFlags()
    flags.note_losses(losses(row, {54: math.nan}))
    flags.on_output(0, 0, torch.tensor(math.nan))
    place = r"token 4 of sample 0 \(from 0, prompt included; id 54\) has loss nan, "
    with job_of_one(), pytest.raises(ScheduleError, match=rf"or an infinity: {place}.*; discard"):
        flags.refuse(lambda _: "samples 2, 0", device=torch.device("cpu"))
    flags = FiniteFlags()
    for microbatch, value in enumerate((3.0, 1e38, 7.0)):
        flags.note_losses(losses(row, {54: value}))
        flags.on_output(0, microbatch, torch.tensor(value))
    flags.check_gradients([[torch.tensor([math.inf])]])
    with job_of_one(), pytest.raises(ScheduleError, match=r"losses do not \(the largest: .*1e\+38"):
        flags.refuse(lambda _: "", device=torch.device("cpu"))
