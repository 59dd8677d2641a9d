"""Experts on rows with shared prefixes: losses, counts and choices of the unshared samples.

Hidden states of a shared token are the same in all of its samples, so logits are made here from the
tokens before each position.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapack import Layout, MicroBatch, SharedPrefixes, build_dp_schedule
from megapack.errors import DataError
from megapack.model.experts.router import PackedRouter
from megapack.model.experts.rows import (
    RoutingShape,
    balance_loss,
    collect_routing,
    routing_row,
    z_loss,
)
from megapack.prefixes import PrefixTable
from megapack.rows.packed import PackedRow, RoutingRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch
from tests.groups import RankOf

pytestmark = pytest.mark.unit

SHAPE = RoutingShape(num_layers=2, num_experts=4, top_k=2)
TOP_K = SHAPE.top_k


def forest(seed: int) -> list[list[int]]:
    """Token ids of samples in trees of depth 1 to 3, in any order, and some by themselves."""
    rng = random.Random(seed)

    def tokens() -> list[int]:
        return [rng.randrange(50) for _ in range(rng.randrange(1, 9))]

    def tree(prefix: list[int], depth: int) -> Iterator[list[int]]:
        for _ in range(rng.randrange(2, 4)):
            longer = prefix + tokens()
            if depth > 1:
                yield from tree(longer, depth - 1)
            else:
                yield longer

    samples = [sample for depth in (1, 2, 3) for sample in tree(tokens(), depth)]
    samples += [tokens(), tokens()]
    rng.shuffle(samples)
    return samples


def rows_of(samples: list[list[int]], layout: Layout, mtp: int = 0) -> tuple[PackedRow, PackedRow]:
    """All samples in one row that shares nothing, and in one that shares; both with a tail."""
    batch = SampleBatch(samples)
    prefixes = SharedPrefixes.from_samples(samples, mtp_num_layers=mtp)
    table = PrefixTable(prefixes, [*map(len, samples)], layout)
    padded = sum(layout.aligned_sample_tokens(len(sample)) for sample in samples)
    order = tuple(range(len(samples)))
    (saved,), _ = table.saved(np.array(order), np.zeros(len(order), dtype=np.int64), 1)
    assert saved > 0
    out = []
    for tokens, shared in (padded, None), (padded - int(saved), table):
        tail = 2 * layout.sample_alignment
        micro_batch = MicroBatch(order, tokens + tail, sum(map(len, samples)), 0, tokens)
        out.append(pack_row(batch, micro_batch, layout, prefixes=shared))
    held = [sum(branch.tokens for branch in row.branches) for row in out]
    assert held[0] - held[1] == saved
    return out[0], out[1]


def position_keys(row: PackedRow) -> list[tuple[int, ...]]:
    """The tokens up to each position of a whole row, which its hidden state depends on."""
    keys: list[tuple[int, ...]] = [(-1, position) for position in range(row.row_tokens)]
    for own in torch.split(row.positions_N, list(row.lengths)):
        tokens = row.tokens_T[own].tolist()
        for offset, position in enumerate(own.tolist()):
            keys[position] = tuple(tokens[: offset + 1])
    return keys


def logits_of(row: PackedRow) -> Tensor:
    """Logits [T, E] that are equal where the tokens up to a position are."""
    rngs = [random.Random(str(key)) for key in position_keys(row)]
    return torch.tensor([[rng.gauss(0, 1) for _ in range(4)] for rng in rngs])


def whole(row: PackedRow, choices: list[Tensor | None] | None = None) -> RoutingRow:
    return routing_row(row, torch.arange(row.row_tokens), choices, SHAPE)


def scores_and_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return scores, chosen.scatter(1, scores.topk(TOP_K).indices, True)


def losses(logits: Tensor, row: RoutingRow) -> tuple[Tensor, Tensor]:
    scores, chosen = scores_and_choices(logits)
    return balance_loss(scores, chosen, row, TOP_K), z_loss(logits, row)


def per_token(row: PackedRow, values_T: Tensor) -> Tensor:
    """Sum of the values at each distinct beginning of a sample, [distinct, E]; no padding."""
    sums: dict[tuple[int, ...], Tensor] = {}
    for key, value in zip(position_keys(row), values_T, strict=True):
        if key[0] >= 0:
            sums[key] = sums.get(key, torch.zeros(())) + value
    return torch.stack([sums[key] for key in sorted(sums)])


@pytest.mark.parametrize("seed", range(8))
def test_losses_and_gradients_are_those_of_unshared_samples(seed: int) -> None:
    rows = rows_of(forest(seed), Layout())
    found = []
    for row in rows:
        logits = logits_of(row).requires_grad_()
        balance, z = losses(logits, whole(row))
        (grad,) = torch.autograd.grad(balance + z, logits)
        # A shared token has the gradient of all its copies.
        found.append((balance.item(), z.item(), per_token(row, grad)))
        assert not grad[row.branch_of_T < 0].any()
    (plain_balance, plain_z, plain_grad), (balance, z, grad) = found
    assert balance == pytest.approx(plain_balance, rel=1e-6)
    assert z == pytest.approx(plain_z, rel=1e-6)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_expert_bias_counts_a_shared_token_once_per_sample(seed: int) -> None:
    counts = []
    for row in rows_of(forest(seed), Layout()):
        _, chosen = scores_and_choices(logits_of(row))
        router: Any = SimpleNamespace(
            _row=whole(row), enable_expert_bias=True, local_tokens_per_expert=torch.zeros(4)
        )
        PackedRouter._apply_expert_bias(router, chosen)
        counts.append(router.local_tokens_per_expert)
    assert torch.equal(counts[0], counts[1])
    assert counts[0].sum() == TOP_K * sum(map(len, forest(seed)))


def some_choices(samples: list[list[int]], seed: int = 0) -> list[Tensor | None]:
    """Experts of each token, equal for samples that begin with the same tokens."""

    def experts(prefix: list[int]) -> Tensor:
        rng = random.Random(f"{seed} {prefix}")
        return torch.tensor([rng.sample(range(4), TOP_K) for _ in range(SHAPE.num_layers)])

    return [
        torch.stack([experts(sample[: n + 1]) for n in range(len(sample))]) for sample in samples
    ]


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True)])
def test_recorded_choices_of_a_shared_token_go_to_all_its_samples(layout: Layout) -> None:
    samples = forest(1)
    prefixes = SharedPrefixes.from_samples(samples)
    lengths = [len(sample) for sample in samples]
    budget = layout.aligned_sample_tokens(sum(lengths) // layout.cp // 2)
    plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=budget, prefixes=prefixes)
    assert plan.prefixes is not None
    table = PrefixTable(plan.prefixes, lengths, layout)
    choices = some_choices(samples)
    rows = []
    is_shared = False
    for micro_batch in plan.steps[0].ranks[0]:
        row = pack_row(SampleBatch(samples), micro_batch, layout, prefixes=table)
        is_shared |= any(len(branch.samples) > 1 for branch in row.branches)
        for rank in range(layout.cp):
            part = slice_row(row, layout.cp, rank)
            for positions in torch.arange(part.tokens_T.numel()).chunk(layout.tp):
                seen = routing_row(part, positions, choices, SHAPE)
                assert seen.choices_tLK is not None
                rows.append(replace(seen, recorded={n: seen.choices_tLK[:, n] for n in range(2)}))
    assert is_shared
    found = collect_routing(
        rows,
        lengths,
        plan.steps[0],
        SHAPE,
        dp_rank=0,
        scope="all",
        groups=[],
        dp_group=RankOf(0, 1),
        device=torch.device("cpu"),
    )
    for value, expected in zip(found, choices, strict=True):
        assert value is not None
        assert torch.equal(value.long(), expected)


PAIR = [[5, 6, 7, 8, 1, 2], [5, 6, 7, 8, 3], [9]]


def test_samples_that_share_tokens_must_agree_on_their_experts() -> None:
    _, row = rows_of(PAIR, Layout())
    choices = some_choices(PAIR)
    assert choices[1] is not None
    choices[1][2, 1] = (choices[1][2, 1] + 1) % 4
    choices[1][1, 0] = choices[1][1, 0].flip(0)  # the order of experts does not matter
    with pytest.raises(DataError) as raised:
        whole(row, choices)
    assert str(raised.value) == (
        "samples 0 and 1 share token 2, and their routing differs there; plan with "
        "SharedPrefixes.from_samples(..., routing=...)"
    )
    # The position of the last common token is not shared, so there they may differ.
    choices = some_choices(PAIR)
    assert choices[1] is not None
    choices[1][3] = (choices[1][3] + 1) % 4
    assert whole(row, choices).choices_tLK is not None
    # Prefixes that know of the routes share only what agrees.
    choices[1][2, 1] = (choices[1][2, 1] + 1) % 4
    routed = SharedPrefixes.from_samples(PAIR, routing=choices)
    assert routed == SharedPrefixes((0, 1), (0, 3))


def test_a_last_token_without_experts_has_those_of_the_sample_that_goes_on() -> None:
    samples = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    _, row = rows_of(samples, Layout())
    choices = some_choices(samples)
    assert choices[0] is not None
    seen = whole(row, [choices[0][:-1], choices[1]])
    assert seen.choices_tLK is not None
    assert torch.equal(seen.choices_tLK[row.positions_N[4:]].long(), choices[1])


@pytest.mark.parametrize("lacking", [0, 1])
def test_of_equal_samples_one_may_lack_the_experts_of_its_last_token(lacking: int) -> None:
    samples = [[1, 2, 3, 4], [1, 2, 3, 4]]
    _, row = rows_of(samples, Layout())
    choices = some_choices(samples)
    expected = choices[1 - lacking]
    assert expected is not None
    choices[lacking] = expected[:-1]
    seen = whole(row, choices)
    assert seen.choices_tLK is not None
    assert torch.equal(seen.choices_tLK[row.positions_N[:4]].long(), expected)
