"""Tables that commands print, one line per plan, step or candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megapack.plan.facts import Counts, Fact


class Column(NamedTuple):
    """One column of a table."""

    head: str
    cell: Callable[[Any], str]
    """Its text in the line of an item."""
    shown: bool = True


def fact_columns(facts: Iterable[Fact], counts_of: Callable[[Any], Counts]) -> list[Column]:
    """A column for each fact about an item's counts."""

    def column(fact: Fact) -> Column:
        return Column(fact.column, lambda item: fact.cell(counts_of(item)))

    return [column(fact) for fact in facts]


def print_columns(columns: Sequence[Column], items: Iterable[Any]) -> None:
    """Print the columns that are shown."""
    shown = [column for column in columns if column.shown]
    head = [column.head for column in shown]
    print_table([head, *([column.cell(item) for column in shown] for item in items)])


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first row is the head, the first column is left-aligned, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
