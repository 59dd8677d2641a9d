"""`Board`: a draft in arrays that the search changes in place.

A cell is the place of a micro-batch: one of M positions of one DP rank. Each cell shows a row; a
row without items is a padding micro-batch. A row of level k lies over 2**k DP ranks, an aligned
block of cells at one position, and all of them show it. The items of a row are a linked list, and
the sums of each row are kept. A row may hold a piece of a long sample, which stays in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import inner, kernel
from megapack.base.loops import copy_into

RANDOM_PARTS = 4096
"""Random numbers between 0 and 1 are multiples of 1/4096."""


class RowCost(NamedTuple):
    """The seconds of one chunk's forward of a row, and limits of a row, by level.

    seconds = fixed[k] + per_token[k] * row tokens + per_token_sq[k] * tokens_sq
        + per_sample[k] * samples
    """

    fixed: Floats
    """[levels]"""
    per_token: Floats
    """[levels]: of all of the row's tokens, those on other GPUs included."""
    per_token_sq: Floats
    per_sample: Floats
    square_factors: Floats
    """[kinds]: factors of per_token_sq of the chunks' kinds, see `pipeline.kernels.RankOps`."""
    unit: Ints
    """[levels]: row alignment in tokens."""
    capacity: Ints
    """[levels]: padded tokens that a row may hold, a multiple of the unit."""
    alone: Ints
    """[levels]: padded tokens that a row of one item may hold, at least `capacity`."""
    lengths: Ints
    """Tokens on one DP rank that a row may have, ascending; none: any multiple of the unit."""
    uniform_tokens: int
    """Length of all rows under row_shape="uniform"; 0 under "planned"."""
    max_live: float
    """Row tokens of one DP rank whose activations a stage may hold, each chunk counted whole; 0
    without a cap."""
    fixed_rows: bool
    """Items stay in their rows, and only the order of each rank is searched."""
    allows_padding: bool
    """Whether rows may stay without items."""


ItemArrays = tuple[Ints, Ints, Ints, Ints, Ints]


class Board(NamedTuple):
    """I items in R rows of dp ranks, at most M micro-batches per rank; there are as many rows as
    cells. Arrays are int64, but for the seconds."""

    cost: RowCost
    item_tokens: Ints
    """[levels, I]: aligned tokens of each item in a row of each level."""
    item_tokens_sq: Ints
    """[levels, I]: sum of squared aligned lengths."""
    item_samples: Ints
    """[I]: number of samples."""
    chain: Ints
    """[I]: number of the piece's chain; -1 for a whole item, which may change rows."""
    kind: Ints
    """[I]: only items of one kind share a row."""
    row_of: Ints
    """[I]: the item's row; -1 for an item that is in no row."""
    next: Ints
    """[I]: the next item of the same row; -1 at the end."""
    head: Ints
    """[R]: the row's first item; -1 without items."""
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
    level: Ints
    """[R]: the row lies over 2**level DP ranks."""
    row_seconds: Floats
    """[R]: seconds of one chunk's forward of the row."""
    rows: Ints
    """[dp, M]: the row of each cell."""
    spare: Ints
    """[R]: rows that no cell shows, because another one lies over their cells."""
    num_spare: Ints
    """[1]: how many these are."""
    seconds: Floats
    """[dp]: simulated seconds; the same for all ranks in lockstep."""


def empty_board(cost: RowCost, items: ItemArrays, shape: tuple[int, int]) -> Board:
    """A board with no item in a row.

    Args:
        items: tokens, squared tokens, samples, chain and kind of each, see `Board`.
        shape: dp and M.
    """
    num_items = items[2].size
    dp, count = shape
    num_rows = dp * count
    return Board(
        cost,
        *items,
        row_of=np.full(num_items, -1, dtype=np.int64),
        next=np.full(num_items, -1, dtype=np.int64),
        head=np.full(num_rows, -1, dtype=np.int64),
        tokens=np.zeros(num_rows, dtype=np.int64),
        tokens_sq=np.zeros(num_rows, dtype=np.int64),
        num_samples=np.zeros(num_rows, dtype=np.int64),
        num_items=np.zeros(num_rows, dtype=np.int64),
        piece_of=np.full(num_rows, -1, dtype=np.int64),
        level=np.zeros(num_rows, dtype=np.int64),
        row_seconds=np.full(num_rows, float(row_seconds(cost, 0, 0, 0, 0))),
        rows=np.arange(num_rows).reshape(shape),
        spare=np.empty(num_rows, dtype=np.int64),
        num_spare=np.zeros(1, dtype=np.int64),
        seconds=np.zeros(dp),
    )


def clone(board: Board) -> Board:
    """A copy whose arrays may be changed."""
    columns: dict[str, Any] = board._asdict()
    arrays: dict[str, Any] = {
        name: own.copy() for name, own in columns.items() if isinstance(own, np.ndarray)
    }
    return board._replace(**arrays)


@inner
def copy_board(source: Board, target: Board) -> None:
    """Write all that moves of items and cells change, and what they took."""
    copy_into(target.row_of, source.row_of)
    copy_into(target.next, source.next)
    copy_into(target.head, source.head)
    copy_into(target.tokens, source.tokens)
    copy_into(target.tokens_sq, source.tokens_sq)
    copy_into(target.num_samples, source.num_samples)
    copy_into(target.num_items, source.num_items)
    copy_into(target.level, source.level)
    copy_into(target.row_seconds, source.row_seconds)
    for rank in range(source.rows.shape[0]):
        copy_into(target.rows[rank], source.rows[rank])
    copy_into(target.spare, source.spare)
    copy_into(target.num_spare, source.num_spare)
    copy_into(target.seconds, source.seconds)


@inner
def next_random(random: Ints, limit: int) -> int:
    """The next number below `limit` of the linear congruential sequence of drand48.

    It is scaled from the upper 32 bits, as the lower bits repeat after few numbers.
    """
    # As plain Python, the product of ints has all its bits; compiled, it wraps, which changes bits
    # above the mask only.
    random[0] = (int(random[0]) * 25214903917 + 11) & 0xFFFFFFFFFFFF
    return int(((random[0] >> 16) * limit) >> 32)


@inner
def row_tokens(cost: RowCost, level: int, tokens: int) -> int:
    """Length of a row, as in `Layout.aligned_row_tokens`; a padding micro-batch has one unit."""
    if cost.uniform_tokens > 0:
        return int(cost.uniform_tokens)
    for length in cost.lengths:
        if length << level >= tokens:
            return int(length << level)
    unit = cost.unit[level]
    return int(max(-(-tokens // unit) * unit, unit))


@inner
def row_seconds(cost: RowCost, level: int, tokens: int, tokens_sq: int, num_samples: int) -> float:
    """Seconds of one chunk's forward of a row; a padding micro-batch has 0, 0, 0."""
    work = cost.per_token[level] * row_tokens(cost, level, tokens)
    work += cost.per_token_sq[level] * tokens_sq
    return float(cost.fixed[level] + work + cost.per_sample[level] * num_samples)


@inner
def kind_seconds(board: Board, row: int, kind: int) -> float:
    """Seconds of the forward of a row through one chunk of a kind."""
    cost = board.cost
    squares = cost.per_token_sq[board.level[row]] * board.tokens_sq[row]
    return float(board.row_seconds[row] + (cost.square_factors[kind] - 1.0) * squares)


@inner
def add_up(board: Board, row: int) -> None:
    """Write the seconds of a row whose sums have changed."""
    board.row_seconds[row] = row_seconds(
        board.cost,
        board.level[row],
        board.tokens[row],
        board.tokens_sq[row],
        board.num_samples[row],
    )


@inner
def microbatch_tokens(board: Board, rank: int, position: int) -> int:
    """Length of a rank's micro-batch, over all ranks that share it."""
    row = board.rows[rank, position]
    return row_tokens(board.cost, board.level[row], board.tokens[row])


@inner
def first_rank(board: Board, rank: int, position: int) -> int:
    """The first of the ranks that share a micro-batch."""
    width = 1 << board.level[board.rows[rank, position]]
    return int(rank - rank % width)


@kernel
def block_width(board: Board, rank: int) -> int:
    """Ranks of the block that a rank is in. Ranks that share rows are in one: rows lie over aligned
    blocks, so the widest row of each of its ranks is as wide."""
    widest = 0
    for position in range(board.rows.shape[1]):
        widest = max(widest, board.level[board.rows[rank, position]])
    return int(1 << widest)


@inner
def slowest(board: Board) -> int:
    """The rank with the most simulated seconds; the first one if ranks are equal."""
    worst = 0
    for rank in range(board.seconds.size):
        if board.seconds[rank] > board.seconds[worst]:
            worst = rank
    return worst


@inner
def fastest(board: Board) -> int:
    """The rank with the fewest simulated seconds; the first one if ranks are equal."""
    best = 0
    for rank in range(board.seconds.size):
        if board.seconds[rank] < board.seconds[best]:
            best = rank
    return best


@kernel
def fill_rows(board: Board, row_of: Ints) -> None:
    """Put all items into rows, which are empty and have their levels.

    Args:
        row_of: int64 [I], the row of each item.
    """
    for item in range(row_of.size - 1, -1, -1):
        _link(board, item, row_of[item])
        if board.chain[item] >= 0:
            board.piece_of[row_of[item]] = item
    add_up_rows(board)


@kernel
def add_up_rows(board: Board) -> None:
    """Write the seconds of all rows."""
    for row in range(board.head.size):
        add_up(board, row)


@inner
def _link(board: Board, item: int, row: int) -> None:
    """Put an item at the head of a row, without the row's seconds."""
    k = board.level[row]
    board.next[item] = board.head[row]
    board.head[row] = item
    board.row_of[item] = row
    board.tokens[row] += board.item_tokens[k, item]
    board.tokens_sq[row] += board.item_tokens_sq[k, item]
    board.num_samples[row] += board.item_samples[item]
    board.num_items[row] += 1


@inner
def _unlink(board: Board, item: int) -> None:
    """Take an item out of its row, without the row's seconds."""
    row = board.row_of[item]
    k = board.level[row]
    at = board.head[row]
    if at == item:
        board.head[row] = board.next[item]
    else:
        while board.next[at] != item:
            at = board.next[at]
        board.next[at] = board.next[item]
    board.tokens[row] -= board.item_tokens[k, item]
    board.tokens_sq[row] -= board.item_tokens_sq[k, item]
    board.num_samples[row] -= board.item_samples[item]
    board.num_items[row] -= 1


@inner
def put(board: Board, item: int, rank: int, position: int, level: int) -> None:
    """Put an item into the row of a cell; cells without items become a row of that level."""
    row = board.rows[rank, position]
    if board.num_items[row] == 0 and level > 0:
        board.level[row] = level
        for r in range(rank + 1, rank + (1 << level)):
            board.spare[board.num_spare[0]] = board.rows[r, position]
            board.num_spare[0] += 1
            board.rows[r, position] = row
    _link(board, item, row)
    add_up(board, row)


@kernel
def put_pieces(board: Board, first: int, cells: Ints, levels: Ints) -> None:
    """Put the pieces from item `first` on into rows without items.

    Args:
        cells: int64 [pieces], rank * M + position of each, of the first of its ranks.
        levels: int64 [pieces], of its row.
    """
    count = board.rows.shape[1]
    for k in range(cells.size):
        rank, position = cells[k] // count, cells[k] % count
        put(board, first + k, rank, position, levels[k])
        board.piece_of[board.rows[rank, position]] = first + k


@inner
def take(board: Board, item: int) -> None:
    """Take an item out of its row."""
    row = board.row_of[item]
    _unlink(board, item)
    board.row_of[item] = -1
    add_up(board, row)


@inner
def clear_row(board: Board, rank: int, position: int, taken: Ints, size: int) -> int:
    """Take all whole items out of a row; without items, each of its cells is a row of its own.

    Args:
        taken: int64, written from `size` on: the items.

    Returns:
        The new size.
    """
    row = board.rows[rank, position]
    item = board.head[row]
    while item >= 0:
        following = board.next[item]
        if board.chain[item] < 0:
            take(board, item)
            taken[size] = item
            size += 1
        item = following
    if board.num_items[row] == 0 and board.level[row] > 0:
        first = first_rank(board, rank, position)
        for r in range(first + 1, first + (1 << board.level[row])):
            board.num_spare[0] -= 1
            board.rows[r, position] = board.spare[board.num_spare[0]]
        board.level[row] = 0
        add_up(board, row)
    return size


@inner
def fits(board: Board, row: int, level: int, leaving: int, coming: int) -> bool:
    """Whether a row of this level stays within its limit, and keeps an item, after one item leaves
    and another one comes; -1 means no item."""
    tokens = board.tokens[row]
    num_items = board.num_items[row]
    if leaving >= 0:
        tokens -= board.item_tokens[level, leaving]
        num_items -= 1
    if coming >= 0:
        tokens += board.item_tokens[level, coming]
        num_items += 1
    cost = board.cost
    limit = cost.alone[level] if num_items == 1 else cost.capacity[level]
    if cost.uniform_tokens > 0:
        limit = min(cost.capacity[level], cost.uniform_tokens)
    return bool(num_items >= 1 and tokens <= limit)


@inner
def exchange(board: Board, a: int, b: int, row_a: int, row_b: int) -> None:
    """Move item a to row_b, and item b to row_a; b = -1 means that no item comes back."""
    _unlink(board, a)
    _link(board, a, row_b)
    if b >= 0:
        _unlink(board, b)
        _link(board, b, row_a)
    add_up(board, row_a)
    add_up(board, row_b)


@inner
def chain_at(board: Board, rank: int, position: int) -> int:
    """The chain of a rank's micro-batch; -1 without one."""
    piece = board.piece_of[board.rows[rank, position]]
    return int(board.chain[piece]) if piece >= 0 else -1
