"""docs/api/*.md are the tool's current output, and leave out no argument of what they list."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from megapack.job.data.advantages import group_advantages
from megapack.loss import GRPO
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tools import make_api_docs as tool
from tools.count_words import words

pytestmark = pytest.mark.unit

PAGES = sorted(tool.FOLDER.glob("*.md"))


def test_each_page_is_in_the_tool() -> None:
    assert [path.stem for path in PAGES] == sorted(tool.PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == tool.page(path), "run tools/make_api_docs.py"


def test_pages_stay_short() -> None:
    counts = [words(path.read_text(encoding="utf-8")).read for path in PAGES]
    assert sum(counts) <= 3500, "leave out what few users call (a minus in the tool's table)"


@pytest.mark.parametrize(
    "function",
    [
        ScheduleAdapter,
        ScheduleAdapter.step,
        ScheduleAdapter.forward,
        SampleBatch,
        SampleBatch.from_prompt_response,
        SampleBatch.from_padded,
        SampleBatch.from_lengths,
    ],
    ids=lambda function: function.__qualname__,
)
def test_docstrings_name_every_argument(function: Callable[..., object]) -> None:
    signature = inspect.signature(function)
    entries = tool.read_docstring(function).entries("Args")
    named = [name.strip() for names, _ in entries for name in names.split(",")]
    assert named == [name for name in signature.parameters if name != "self"]


def example(first: int, *, choice: Literal["a", "b"] = "a", **more: object) -> list[int]:
    """Show what a page takes from a docstring.

        example(1)

    More prose.

    Args:
        first: tokens of a row. More of it.
        choice, more: what else
            there is.

    Returns:
        Nothing. Really.

    Raises:
        ValueError: never.
    """
    return []


def test_docstrings_are_read() -> None:
    read = tool.read_docstring(example)
    assert read.summary == "Show what a page takes from a docstring."
    assert read.example == "example(1)"
    assert read.entries("Args") == [
        ("first", "tokens of a row."),
        ("choice, more", "what else there is."),
    ]
    assert read.sections["Returns"] == "Nothing. Really."
    assert read.entries("Raises") == [("ValueError", "never.")]


def test_an_interactive_example_ends_before_the_prose() -> None:
    assert tool.read_docstring(group_advantages).example.endswith("\n[0.5, -0.5]")


def test_signatures_show_choices_and_defaults() -> None:
    assert tool.function_code(example, "example") == (
        "def example(\n"
        "    first: int,\n"
        "    *,\n"
        '    choice: Literal["a", "b"] = "a",\n'
        "    **more: object,\n"
        ") -> list[int]: ..."
    )
    # Its own fields; PPO's are in PPO's section.
    assert tool.class_code(GRPO).splitlines()[1:] == [
        "class GRPO(PPO):",
        "    kl_coef: float = 0.0",
        '    kl_kind: Literal["k1", "k2", "k3"] = "k3"',
    ]
