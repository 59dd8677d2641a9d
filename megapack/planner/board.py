"""`Board`: a draft of rows on one DP rank each, in arrays that the search changes in place.

The items of a row are a linked list, and exchanges keep the sums of each row. A row may hold a
piece of a long sample. The search may shift the cut between two neighbouring pieces; they stay in
their rows.
"""

from __future__ import annotations

from typing import NamedTuple

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel


class RowCost(NamedTuple):
    """The seconds of one chunk's forward of a row, and limits of a row.

    seconds = fixed + per_token * row tokens + per_token_sq * tokens_sq + per_sample * samples
    """

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    unit: int
    """Row alignment in tokens."""
    uniform_tokens: int
    """Length of all rows under row_shape="uniform"; 0 under "planned"."""
    capacity: int
    """Padded tokens that a row may hold."""
    max_live: float
    """Row tokens whose activations a stage may hold, each chunk counted whole; 0 without a cap."""
    fixed_rows: bool
    """Items stay in their rows, and only the order of each rank is searched."""


class Board(NamedTuple):
    """I items in R rows of dp ranks, at most M micro-batches per rank. Arrays are int64, but for
    the seconds."""

    cost: RowCost
    item_tokens: Ints
    """[I]: aligned tokens."""
    item_tokens_sq: Ints
    """[I]: sum of squared aligned lengths."""
    item_samples: Ints
    """[I]: number of samples."""
    begin: Ints
    """[I]: first padded token of a piece; 0 for a whole item. See `items.Pieces`."""
    end: Ints
    """[I]: padded token after the last one."""
    chain: Ints
    """[I]: number of the piece's chain; -1 for a whole item, which may change rows."""
    row_of: Ints
    """[I]: the item's row."""
    next: Ints
    """[I]: the next item of the same row; -1 at the end."""
    head: Ints
    """[R]: the row's first item."""
    tokens: Ints
    """[R]: aligned tokens."""
    tokens_sq: Ints
    """[R]: sum of squared aligned lengths."""
    num_samples: Ints
    """[R]: number of samples."""
    num_items: Ints
    """[R]: number of items."""
    piece_of: Ints
    """[R]: the item that is the row's piece; -1 without one."""
    rows: Ints
    """[dp, M]: each micro-batch's row; -1 for padding."""
    counts: Ints
    """[dp]: micro-batches of each rank."""
    seconds: Floats
    """[dp]: simulated seconds; the same for all ranks in lockstep."""


@kernel
def row_tokens(cost: RowCost, tokens: int) -> int:
    """Length of a row, as in `Layout.aligned_row_tokens`; a padding micro-batch has one unit."""
    if cost.uniform_tokens > 0:
        return cost.uniform_tokens
    return max(-(-tokens // cost.unit) * cost.unit, cost.unit)


@kernel
def row_seconds(cost: RowCost, tokens: int, tokens_sq: int, num_samples: int) -> float:
    """Seconds of one chunk's forward of a row; a padding micro-batch has 0, 0, 0."""
    work = cost.per_token * row_tokens(cost, tokens) + cost.per_token_sq * tokens_sq
    return cost.fixed + work + cost.per_sample * num_samples


@kernel
def microbatch_tokens(board: Board, rank: int, position: int) -> int:
    """Length of a rank's micro-batch."""
    row = board.rows[rank, position]
    return row_tokens(board.cost, board.tokens[row] if row >= 0 else 0)


@kernel
def microbatch_seconds(board: Board, rank: int, position: int) -> float:
    """Seconds of one chunk's forward of a rank's micro-batch."""
    row = board.rows[rank, position]
    if row < 0:
        return row_seconds(board.cost, 0, 0, 0)
    return row_seconds(board.cost, board.tokens[row], board.tokens_sq[row], board.num_samples[row])


@kernel
def slowest(board: Board) -> int:
    """The rank with the most simulated seconds; the first one if ranks are equal."""
    worst = 0
    for rank in range(board.seconds.size):
        if board.seconds[rank] > board.seconds[worst]:
            worst = rank
    return worst


@kernel
def fastest(board: Board) -> int:
    """The rank with the fewest simulated seconds; the first one if ranks are equal."""
    best = 0
    for rank in range(board.seconds.size):
        if board.seconds[rank] < board.seconds[best]:
            best = rank
    return best


@kernel
def fill_rows(board: Board) -> None:
    """Link the items of each row, in ascending order, and add up their sizes."""
    for item in range(board.row_of.size - 1, -1, -1):
        row = board.row_of[item]
        board.next[item] = board.head[row]
        board.head[row] = item
        board.tokens[row] += board.item_tokens[item]
        board.tokens_sq[row] += board.item_tokens_sq[item]
        board.num_samples[row] += board.item_samples[item]
        board.num_items[row] += 1
        if board.chain[item] >= 0:
            board.piece_of[row] = item


@kernel
def _unlink(board: Board, item: int) -> None:
    """Take an item out of its row's linked list."""
    row = board.row_of[item]
    at = board.head[row]
    if at == item:
        board.head[row] = board.next[item]
        return
    while board.next[at] != item:
        at = board.next[at]
    board.next[at] = board.next[item]


@kernel
def _move(board: Board, item: int, row: int) -> None:
    """Move an item from its row to another one."""
    old = board.row_of[item]
    _unlink(board, item)
    board.tokens[old] -= board.item_tokens[item]
    board.tokens_sq[old] -= board.item_tokens_sq[item]
    board.num_samples[old] -= board.item_samples[item]
    board.num_items[old] -= 1
    board.next[item] = board.head[row]
    board.head[row] = item
    board.row_of[item] = row
    board.tokens[row] += board.item_tokens[item]
    board.tokens_sq[row] += board.item_tokens_sq[item]
    board.num_samples[row] += board.item_samples[item]
    board.num_items[row] += 1


@kernel
def fits(board: Board, row: int, leaving: int, coming: int) -> bool:
    """Whether a row stays legal after one item leaves and another one comes; -1 means no item.

    A row keeps at least one item, and respects the capacity unless its only item is larger.
    """
    cost = board.cost
    tokens = board.tokens[row]
    num_items = board.num_items[row]
    if leaving >= 0:
        tokens -= board.item_tokens[leaving]
        num_items -= 1
    if coming >= 0:
        tokens += board.item_tokens[coming]
        num_items += 1
    limit = cost.capacity
    if cost.uniform_tokens > 0:
        limit = min(limit, cost.uniform_tokens)
    oversize = num_items == 1 and cost.uniform_tokens == 0
    return num_items >= 1 and (tokens <= limit or oversize)


@kernel
def exchange(board: Board, a: int, b: int, row_a: int, row_b: int) -> None:
    """Move item a to row_b, and item b to row_a; b = -1 means that no item comes back."""
    _move(board, a, row_b)
    if b >= 0:
        _move(board, b, row_a)


@kernel
def shift_cut(board: Board, piece: int, tokens: int) -> None:
    """Give so many tokens of the next piece of a chain to a piece; negative ones to the next."""
    before = board.end[piece]
    after = before + tokens
    squares = after * after - before * before
    board.end[piece] = after
    board.begin[piece + 1] = after
    for item, sign in ((piece, 1), (piece + 1, -1)):
        row = board.row_of[item]
        board.item_tokens[item] += sign * tokens
        board.item_tokens_sq[item] += sign * squares
        board.tokens[row] += sign * tokens
        board.tokens_sq[row] += sign * squares
