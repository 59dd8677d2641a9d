"""Parts of documents that tools write: what stands between two marks of a page, and tables."""

from __future__ import annotations

from collections.abc import Sequence

Marks = tuple[str, str]
"""The lines before and after a part, such as `<!-- claims -->` and `<!-- end of claims -->`."""


def put_between(page: str, marks: Marks, body: str) -> str:
    """The page's text with another part between its marks.

    Raises:
        ValueError: the page does not have each mark once, in this order.
    """
    before, first, rest = page.partition(marks[0])
    _, last, after = rest.partition(marks[1])
    if not (first and last) or marks[0] in rest or marks[1] in after:
        raise ValueError(f"the page must have {marks[0]} and then {marks[1]}, each once")
    return f"{before}{first}\n{body}\n{last}{after}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
