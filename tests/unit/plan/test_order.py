"""Orders of operations: Megatron's, with chains, and read from text."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.plan.order import (
    Operation,
    StepOrder,
    chain_order,
    step_order,
)
from megapack.plan.order_text import read_order

SHAPES = [
    (pp, vpp, group)
    for pp, vpp in itertools.product((1, 2, 4), (1, 2, 3))
    if pp > 1 or vpp == 1
    for group in ((pp,) if vpp == 1 else (pp, pp + 1, 2 * pp))
]


def chains_of(count: int, group: int, vpp: int, seed: int) -> list[range]:
    """Random chains, with vpp > 1 inside of groups."""
    rng = random.Random(seed)
    chains = []
    first = 0
    while first < count:
        last = min(count, first + rng.choice([1, 1, 2, 3, 5]))
        if vpp > 1:
            last = min(last, (first // group + 1) * group)
        if last - first > 1:
            chains.append(range(first, last))
        first = last
    return chains


@pytest.mark.parametrize(("pp", "vpp", "group"), SHAPES)
def test_orders_with_chains_can_run_and_read_back(pp: int, vpp: int, group: int) -> None:
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group if vpp > 1 else None)
    for count in filter(layout.is_legal_count, range(1, 20)):
        chains = chains_of(count, group, vpp, seed=count)
        order = chain_order(pp, vpp, count, group, chains)
        again = read_order(order.lines(), vpp=vpp, num_microbatches=count, chains=chains)
        assert again.lines() == order.lines()
        assert np.array_equal(again.waits_for, order.waits_for)


@pytest.mark.parametrize(("pp", "vpp", "group"), SHAPES)
def test_without_chains_the_order_is_megatrons(pp: int, vpp: int, group: int) -> None:
    count = 3 * group
    plain = step_order(pp, vpp, count, group, False)
    assert chain_order(pp, vpp, count, group, []).lines() == plain.lines()


def test_a_chain_holds_its_pieces_and_the_warm_up() -> None:
    order = chain_order(4, 1, 8, 1, [range(2, 5)])
    # Before the chain's first backward, stage s has run 5 + 3 - s forwards and 2 backwards.
    assert order.peak_live(np.ones(8)).tolist() == [6, 5, 4, 3]


def test_weight_gradients_hold_a_row_longer() -> None:
    texts = ["0F0 0B0 1F0 1B0 0W0 1W0"]
    order = read_order(texts, vpp=1, num_microbatches=2)
    assert order.has_weights
    assert order.held.tolist() == [1, 0, 1, 0, -1, -1]
    assert order.peak_live(np.array([3.0, 4.0])).tolist() == [7.0]
    assert order.operations(0)[4] == Operation("W", 0, 0)


ILLEGAL = {
    "a word": (["0F0 x"], r"stage 0 has the operation 'x'; write micro-batch"),
    "another kind": (["0F0 0D0"], r"stage 0 has the operation '0D0'"),
    "an unknown micro-batch": (["0F0 0B0 2F0"], r"stage 0 cannot run 2F0: there are 2"),
    "an unknown chunk": (["0F0 0B0 1F1"], r"stage 0 cannot run 1F1: there are 2 .* 1 chunks"),
    "one missing": (["0F0 0B0 1F0"], r"stage 0 never runs 1B0"),
    "one twice": (["0F0 0B0 1F0 1B0 1B0"], r"stage 0 runs 1B0 twice"),
    "backward first": (["0B0 0F0 1F0 1B0"], r"stage 0 cannot run 0B0: its forward 0F0 comes"),
    "weights first": (["0F0 0W0 0B0 1F0 1B0"], r"stage 0 cannot run 0W0: its backward 0B0 comes"),
    "a circle": (
        ["0F0 0B0 1F0 1B0", "1F0 1B0 0F0 0B0"],
        r"stage 0 cannot run 0B0: the same operation in the chunk after it, 0B of model chunk 1,",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_order_names_the_operation(name: str) -> None:
    lines, message = ILLEGAL[name]
    with pytest.raises(PlanError, match=message):
        read_order(lines, vpp=1, num_microbatches=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1F0 0F0 1B0 0B0", r"cannot run 1F0: the piece before it, 0F0 comes later"),
        ("0F0 1F0 0B0 1B0", r"cannot run 0B0: the backward of the next piece, 1B0 comes later"),
    ],
)
def test_pieces_run_forward_and_back(line: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_order([line], vpp=1, num_microbatches=2, chains=[range(2)])


def random_order(pp: int, vpp: int, count: int, seed: int) -> StepOrder:
    """An order that one run of the operations in any possible order leaves on the stages."""
    rng = random.Random(seed)
    lines: list[list[str]] = [[] for _ in range(pp)]
    done: set[tuple[str, int, int]] = set()
    todo = [(kind, k, c) for kind in "FBW" for k in range(count) for c in range(pp * vpp)]
    while todo:
        can_run = []
        for kind, k, c in todo:
            needs = {
                "F": [("F", k, c - 1)] if c else [],
                "B": [("F", k, c), *([("B", k, c + 1)] if c + 1 < pp * vpp else [])],
                "W": [("B", k, c)],
            }
            if all(need in done for need in needs[kind]):
                can_run.append((kind, k, c))
        op = rng.choice(can_run)
        todo.remove(op)
        done.add(op)
        lines[op[2] % pp].append(f"{op[1]}{op[0]}{op[2] // pp}")
    return read_order([" ".join(line) for line in lines], vpp=vpp, num_microbatches=count)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_that_ran_once_is_legal(seed: int) -> None:
    order = random_order(2, 2, 4, seed)
    assert order.stage.size == 3 * 4 * 4
    assert (order.waits_for[order.waits_for < 48] < np.flatnonzero(order.waits_for < 48)).all()
