"""Shapes of samples, as data: their trees, rows of them made by hand, and what plans then hold.

Rows made by hand certainly have what a case is about; the planner might choose otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.dist.rows.row_problem import Family, Samples
from tests.made_rows import Slot

Facts = Mapping[str, Any]
"""What a plan must have, see `row_case.row_facts`: an int is the least, a list the exact value."""


@dataclass(frozen=True, kw_only=True)
class MadeRows:
    """Rows made by hand. The policy of their plan follows from their widths and pieces."""

    slots: Sequence[Slot]
    row_tokens: int
    """The budget of a row of one DP rank, before it is cut over context-parallel ranks."""
    expect: Facts


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The samples of a case, and its rows."""

    families: Sequence[Family]
    row_tokens: int = 64
    """The budget of the planner, before a row is cut over context-parallel ranks."""
    plain_row_tokens: int = 64
    """The same for the plan of plain rows."""
    pairs: str = ""
    """The shape that objectives of pairs run on."""
    together: str = ""
    """Colocated sets: `pairs` of samples, or `families` that then meet in a row."""
    meet: tuple[int, ...] = ()
    """Those families."""
    made: Mapping[int, MadeRows] = field(default_factory=dict)
    """By dp; rows of other layouts are the planner's."""
    expect: Facts = field(default_factory=dict)
    """What plans of the planner hold."""

    def sets(self, samples: Samples) -> list[int] | None:
        """`colocate_ids` of the samples."""
        if self.together == "pairs":
            return [i // 2 for i in range(len(samples.family_of))]
        if not self.meet:
            return None
        first = samples.family_of.index(self.meet[0])
        return [first if family in self.meet else i for i, family in enumerate(samples.family_of)]


_GROUP: Family = (13, [7, 1, 22, 0, 12])
_DEEP: Family = (9, [(6, [(4, [5, 3]), 7]), (5, [2, 4]), 3])
# 24 shared tokens and 63 of responses: more than a row of 64, and each half less.
_LONG: Family = (24, [9, 12, 10, 11, 8, 13])
_TWICE: Family = (5, [(6, [0, 0])])
_SMALL: Family = (8, [4, 6])


def _sharing(families: Sequence[Family], **expect: int) -> Shape:
    """Families whose samples share tokens."""
    return Shape(families=families, pairs="pairs", expect={"shared_tokens": 9, **expect})


_PREFIXES = {
    # All that the others have. The families 4 and 5 are in one row.
    "mixed": Shape(
        families=[_GROUP, _DEEP, (1, [6, 11]), _LONG, _TWICE, _SMALL, (3, [14]), (1, [25])],
        pairs="pairs",
        meet=(4, 5),
        expect={
            **{"shared_tokens": 9, "families_in_a_row": 2, "depth": 3},
            **{"cut_families": 1, "shared_losses": 20},
        },
    ),
    # A pair in every two leaves.
    "pairs": Shape(
        families=[
            *[_LONG, (13, [7, 1, 22, 5]), (9, [(6, [(4, [5, 3]), 7]), 10])],
            *[(8, [4, 6]), (1, [6, 11]), (16, [5, 3])],
        ],
        pairs="pairs",
        together="pairs",
        expect={"shared_tokens": 9, "cut_families": 1, "shared_losses": 20},
    ),
    # Shares nothing.
    "g1": Shape(
        families=[(p, [r]) for p, r in [(9, 14), (4, 21), (12, 3), (7, 7), (15, 11), (2, 30)]]
    ),
    "g2": _sharing(
        [(p, [r, r + 3]) for p, r in [(9, 11), (4, 15), (12, 3), (7, 7), (15, 8), (20, 2)]]
        + [(3, [1, 2])] * 4,
        families_in_a_row=2,
    ),
    "g8": _sharing([(10, [3, 9, 1, 5, 6, 2, 7, 4]), (6, [4, 2, 8, 3, 1, 6, 5, 7])], cut_families=1),
    "one-token prompts": _sharing(
        [(1, [6, 11]), (1, [(9, [4, 5]), 7]), (1, [9, 2, 8])], shared_losses=10
    ),
    "no responses": _sharing(
        [(13, [7, 0, 12]), (6, [0, 0]), (9, [(4, [0, 5]), 3])], shared_losses=5
    ),
    "depth 3": _sharing(
        [_DEEP, (5, [(3, [(4, [(2, [3, 1]), 6]), 5]), 4])], depth=3, shared_losses=40
    ),
    "cut in two": _sharing([_LONG], cut_families=1),
    "equal samples": _sharing([_TWICE, (9, [4, 7]), (3, [(8, [0, 0, 0])])], shared_losses=30),
}

_MIXED_2 = {"rows_1": 3, "rows_2": 3, "packed_wide": 2, "padding_rows": 1}
_MIXED_4 = {
    **{"rows_1": 3, "rows_2": 3, "rows_4": 1, "packed_wide": 3, "padding_rows": 2},
    **{"mixed_slots": 2, "padding_beside": 2, "later_blocks": 1},
}
"""Numbers of micro-batches are even, as pp2 x vpp2 needs them."""
_WIDE = {
    # 18 samples of 79, 55, 36, 20, 14, 35, 13, 25, 19, 15, 16, 7, 41, 17, 1, 33, 8 and 14 tokens.
    "wide": Shape(
        families=[
            *[(9, [70]), (30, [25, 6]), (13, [7, 1, 22, 0, 12]), (9, [(6, [4, 0]), 7])],
            *[(1, [6, 40]), (3, [14]), (1, [0]), (20, [13]), (5, [3, 9])],
        ],
        # Of the planner 79 tokens need four ranks, 36 two of them.
        row_tokens=24,
        plain_row_tokens=132,
        pairs="wide pairs",
        made={
            2: MadeRows(
                slots=[
                    [(2, [0, 14])],
                    [(1, [3, 4]), (1, [])],
                    [(2, [5, 6, 7])],
                    [(2, [1, 2])],
                    [(1, [12]), (1, [8, 9, 10])],
                    [(1, [11, 13]), (1, [15, 16, 17])],
                ],
                row_tokens=72,
                expect=_MIXED_2 | {"short_in_wide": 1},
            ),
            4: MadeRows(
                slots=[
                    [(4, [0, 14])],
                    [(2, [11, 12]), (1, [3, 4]), (1, [])],
                    [(1, [16, 17]), (1, []), (2, [5, 6, 7])],
                    [(4, [1, 2])],
                    [(2, [8, 9, 10]), (2, [15])],
                    [(1, [13]), (1, []), (1, []), (1, [])],
                ],
                row_tokens=48,
                expect=_MIXED_4 | {"short_in_wide": 1},
            ),
        },
    ),
    # Pairs of 74 and 54, 35 and 20, 19 and 25, 7 and 41, 12 and 14, 21 and 19, 17 and 14 tokens.
    "wide pairs": Shape(
        families=[
            *[(24, [50, 30]), (13, [22, 7]), (9, [(6, [4, 10])]), (1, [6, 40])],
            *[(8, [4, 6]), (16, [5, 3]), (5, [12, 9])],
        ],
        row_tokens=24,
        # The longest pair has 128 tokens, and 132 over cp2.
        plain_row_tokens=132,
        together="pairs",
        made={
            2: MadeRows(
                slots=[
                    [(2, [0, 1])],
                    [(1, [8, 9]), (1, [10, 11])],
                    [(2, [6, 7])],
                    [(2, [2, 3])],
                    [(1, [12, 13]), (1, [])],
                    [(1, [4, 5]), (1, [])],
                ],
                row_tokens=72,
                expect=_MIXED_2,
            ),
            4: MadeRows(
                slots=[
                    [(4, [0, 1])],
                    [(2, [6, 7]), (1, [8, 9]), (1, [])],
                    [(1, [10, 11]), (1, []), (2, [2, 3])],
                    [(2, [4, 5]), (1, [12, 13]), (1, [])],
                ],
                row_tokens=48,
                expect=_MIXED_4,
            ),
        },
    ),
}

_CHAINS = {"chains": [2, 3], "pieces": [2, 3]}
_FAMILIES = {"chains": [2, 3], "pieces": [2] * 6, "shared_losses": 100}
_SPLIT = {
    # 11 samples of 97, 12, 40, 64, 7, 21, 1, 18, 33, 9 and 15 tokens. Sample 0 has a long prompt,
    # so that its first piece has no loss.
    "split": Shape(
        families=[
            *[(44, [53]), (3, [9]), (10, [30]), (5, [59]), (3, [4]), (20, [1]), (1, [0])],
            *[(8, [10]), (11, [22]), (4, [5]), (6, [9])],
        ],
        plain_row_tokens=128,
        made={
            # A chain of three, with another sample in the last row, and a chain of two, each of
            # whose rows has one more sample. With vpp2 and G=4 each chain is in one group.
            1: MadeRows(
                slots=[
                    [(1, [0], {0: (0, 32)})],
                    [(1, [0], {0: (32, 64)})],
                    [(1, [0, 1], {0: (64, 97)})],
                    [(1, [2, 6])],
                    [(1, [3, 4], {3: (0, 40)})],
                    [(1, [3, 5], {3: (40, 64)})],
                    [(1, [7, 8])],
                    [(1, [9, 10])],
                ],
                row_tokens=64,
                expect=_CHAINS,
            ),
            2: MadeRows(
                slots=[
                    [(1, [0], {0: (0, 32)}), (1, [7, 8])],
                    [(1, [0], {0: (32, 64)}), (1, [3, 4], {3: (0, 40)})],
                    [(1, [0, 1], {0: (64, 97)}), (1, [3, 5], {3: (40, 64)})],
                    [(1, [2, 6]), (1, [9, 10])],
                ],
                row_tokens=64,
                expect=_CHAINS,
            ),
        },
    ),
    # Samples of 97, 16, 18, 15, 64, 14, 16, 21, 1, 18 and 33 tokens. Samples 1 to 3 are a family,
    # and so are 5 and 6. A piece stands beside a family in two rows.
    "shared": Shape(
        families=[
            *[(44, [53]), (12, [4, 6, 3]), (5, [59]), (12, [2, 4])],
            *[(20, [1]), (1, [0]), (8, [10]), (11, [22])],
        ],
        plain_row_tokens=128,
        made={
            1: MadeRows(
                slots=[
                    [(1, [0], {0: (0, 32)})],
                    [(1, [0], {0: (32, 64)})],
                    [(1, [0, 1, 2], {0: (64, 97)})],
                    [(1, [3, 7])],
                    [(1, [4, 5, 6], {4: (0, 40)})],
                    [(1, [4], {4: (40, 64)})],
                    [(1, [8, 9])],
                    [(1, [10])],
                ],
                row_tokens=64,
                expect=_CHAINS,
            ),
        },
    ),
    # Pairs of 18 and 12, of 33 and 35, which share 10, and of 11 and 12 tokens, which share 4; a
    # family of 84, 53, 54 and 51, which share 43 positions, 23 of them with losses, and the last
    # two of them 47; one of 59 and 40, which share 38.
    "family": Shape(
        families=[
            *[(8, [10, 4]), (20, [(24, [40, 9, (4, [6, 3])])]), (30, [(9, [20, 1])])],
            *[(11, [22, 24]), (5, [6, 7])],
        ],
        plain_row_tokens=144,
        pairs="family",
        together="pairs",
        made={
            # The first family is in three rows. Second pieces of the last one share more, and are
            # beside whole samples that share. With vpp2 and G=4 each family is in one group.
            1: MadeRows(
                slots=[
                    [(1, [2, 3, 4, 5, 0, 1], dict.fromkeys((2, 3, 4, 5), (0, 40)))],
                    [(1, [3, 2], {3: (40, 53), 2: (40, 84)})],
                    [(1, [4, 5, 10, 11], {4: (40, 54), 5: (40, 51)})],
                    [(1, [8, 9])],
                    [(1, [7, 6], dict.fromkeys((7, 6), (0, 32)))],
                    [(1, [6, 7], {6: (32, 59), 7: (32, 40)})],
                ],
                row_tokens=72,
                expect=_FAMILIES,
            ),
            2: MadeRows(
                slots=[
                    [
                        (1, [2, 3, 4, 5, 0, 1], dict.fromkeys((2, 3, 4, 5), (0, 40))),
                        (1, [7, 6], dict.fromkeys((7, 6), (0, 32))),
                    ],
                    [
                        (1, [3, 2], {3: (40, 53), 2: (40, 84)}),
                        (1, [6, 7], {6: (32, 59), 7: (32, 40)}),
                    ],
                    [(1, [4, 5, 10, 11], {4: (40, 54), 5: (40, 51)}), (1, [8, 9])],
                ],
                row_tokens=72,
                expect=_FAMILIES,
            ),
        },
    ),
}

_OVERLAPPING = {"chains": [2, 3], "pieces": [2, 3], "packed_wide": 2}
_JOINED = {
    # The samples of "split". Chains lie over several ranks, and beside them rows of others.
    "wide pieces": Shape(
        families=_SPLIT["split"].families,
        plain_row_tokens=128,
        made={
            # With vpp2 and G=4 each chain is in one group.
            2: MadeRows(
                slots=[
                    [(2, [0], {0: (0, 32)})],
                    [(2, [0], {0: (32, 64)})],
                    [(2, [0, 1], {0: (64, 97)})],
                    [(2, [2, 9])],
                    [(2, [3, 4], {3: (0, 40)})],
                    [(2, [3, 5], {3: (40, 64)})],
                    [(1, [7, 8]), (1, [10])],
                    [(1, [6]), (1, [])],
                ],
                row_tokens=64,
                expect={"chains": [2, 2, 3, 3], "pieces": [2, 3], "rows_2": 6},
            ),
            # Two ranks share a chain, and the others have orders of their own.
            4: MadeRows(
                slots=[
                    [(2, [0], {0: (0, 32)}), (1, [2]), (1, [7, 8])],
                    [(2, [0], {0: (32, 64)}), (1, [3, 4], {3: (0, 40)}), (1, [10])],
                    [(2, [0, 1], {0: (64, 97)}), (1, [3, 5], {3: (40, 64)}), (1, [9])],
                    [(2, [6]), (1, []), (1, [])],
                ],
                row_tokens=64,
                expect={"chains": [2, 3, 3], "pieces": [2, 3], "rows_2": 4, "gpus": [1, 2]},
            ),
        },
    ),
    # The samples of "split". Chains of two ranks overlap, and rows of one rank stand beside them.
    "joined": Shape(
        families=_SPLIT["split"].families,
        plain_row_tokens=128,
        made={
            # With vpp2 and G=4 the chains are in one group.
            2: MadeRows(
                slots=[
                    [(1, [0], {0: (0, 32)}), (1, [7])],
                    [(1, [0], {0: (32, 64)}), (1, [10])],
                    [(1, [0, 1], {0: (64, 97)}), (1, [3, 4], {3: (0, 40)})],
                    [(1, [5]), (1, [3], {3: (40, 64)})],
                    [(2, [2, 9])],
                    [(2, [6, 8])],
                ],
                row_tokens=64,
                expect=_OVERLAPPING | {"rows_1": 8, "rows_2": 2},
            ),
            # Backwards of wide rows are in reverse where chains of other ranks are.
            4: MadeRows(
                slots=[
                    [(4, [2, 9])],
                    [(2, [8, 6]), (1, [0], {0: (0, 32)}), (1, [7])],
                    [(1, [10]), (1, []), (1, [0], {0: (32, 64)}), (1, [3, 4], {3: (0, 40)})],
                    [(1, [5]), (1, []), (1, [0], {0: (64, 97)}), (1, [3], {3: (40, 64)})],
                    [(1, []), (1, []), (2, [1])],
                ],
                row_tokens=64,
                expect=_OVERLAPPING | {"rows_4": 1, "rows_2": 2, "later_blocks": 1},
            ),
        },
    ),
}

_TURNS = {
    # Two prompts. Of the first one rollouts of 3 and 2 turns, each of which begins with the one
    # before it. Of the second one a rollout of 5 turns, compacted after the third, and one of 2.
    # Samples of 26, 33, 63, 29 and 37; of 19, 25, 32, 23, 25, 16 and 19 tokens.
    "agents": Shape(
        families=[
            (20, [(6, [0, (7, [0, 30])]), (9, [0, 8])]),
            (4, [(10, [(5, [0, (6, [0, 7])]), (9, [0, 2])]), (8, [(4, [0, 3])])]),
        ],
        pairs="pairs",
        made={
            # The first prompt's turns are cut inside of it. A turn ends inside of a piece.
            1: MadeRows(
                slots=[
                    [(1, [0, 1, 2, 3, 4], dict.fromkeys(range(5), (0, 16)))],
                    [(1, [0, 1, 2], {0: (16, 26), 1: (16, 33), 2: (16, 63)})],
                    [(1, [3, 4, 10, 11], {3: (16, 29), 4: (16, 37)})],
                    [(1, [5, 6, 7, 8, 9])],
                ],
                row_tokens=72,
                expect={"chains": [3], "pieces": [2] * 5},
            ),
            2: MadeRows(
                slots=[
                    [(1, [0, 1, 2, 3, 4], dict.fromkeys(range(5), (0, 16))), (1, [5, 6])],
                    [(1, [0, 1, 2], {0: (16, 26), 1: (16, 33), 2: (16, 63)}), (1, [7, 8])],
                    [(1, [3, 4, 10, 11], {3: (16, 29), 4: (16, 37)}), (1, [9])],
                ],
                row_tokens=72,
                expect={"chains": [3], "pieces": [2] * 5},
            ),
        },
        expect={"shared_tokens": 80, "depth": 2, "shared_losses": 20},
    ),
}

SHAPES = _PREFIXES | _TURNS | _WIDE | _SPLIT | _JOINED
