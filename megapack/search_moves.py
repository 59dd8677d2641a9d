"""Moves of items between rows."""

from __future__ import annotations

from megapack.jit import kernel
from megapack.search_scoring import RowCost, State


@kernel
def _unlink(state: State, item: int) -> None:
    row = state.row_of[item]
    at = state.head[row]
    if at == item:
        state.head[row] = state.next[item]
        return
    while state.next[at] != item:
        at = state.next[at]
    state.next[at] = state.next[item]


@kernel
def _move(state: State, item: int, row: int) -> None:
    """Take an item from its row to another one."""
    old = state.row_of[item]
    _unlink(state, item)
    state.tokens[old] -= state.item_tokens[item]
    state.tokens_sq[old] -= state.item_tokens_sq[item]
    state.samples[old] -= state.item_samples[item]
    state.num[old] -= 1
    state.next[item] = state.head[row]
    state.head[row] = item
    state.row_of[item] = row
    state.tokens[row] += state.item_tokens[item]
    state.tokens_sq[row] += state.item_tokens_sq[item]
    state.samples[row] += state.item_samples[item]
    state.num[row] += 1


@kernel
def fits(cost: RowCost, state: State, row: int, leaving: int, coming: int) -> bool:
    """Whether a row may change one item for another; -1 stands for none."""
    tokens = state.tokens[row]
    num = state.num[row]
    if leaving >= 0:
        tokens -= state.item_tokens[leaving]
        num -= 1
    if coming >= 0:
        tokens += state.item_tokens[coming]
        num += 1
    limit = cost.capacity
    if cost.uniform_tokens > 0:
        limit = min(limit, cost.uniform_tokens)
    return num >= 1 and (tokens <= limit or (num == 1 and cost.uniform_tokens == 0))


@kernel
def exchange(state: State, a: int, b: int, row_a: int, row_b: int) -> None:
    """Item a goes to row_b and b, where there is one, to row_a."""
    _move(state, a, row_b)
    if b >= 0:
        _move(state, b, row_a)
