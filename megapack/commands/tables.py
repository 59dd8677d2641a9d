"""Tables that commands print, one line per plan, step or candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megapack.base.tables import format_table
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
    print(format_table([head, *([column.cell(item) for column in shown] for item in items)]))
