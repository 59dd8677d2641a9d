"""The files that tools/exactness.py and tools/model_sizes.py write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import model_sizes
from tools.pages import measured
from tools.pages.exactness_files import FILES, is_whole, publish
from tools.pages.measured import Head

pytestmark = pytest.mark.unit

LINES = ["2 cells; the largest gradient error is 1.0e-06.", "", "| layout |", "|---|", "| pp2 |"]


def test_a_whole_table_is_written_and_a_part_is_printed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    publish("exactness_prefixes", LINES, "torch 2", whole=False)
    assert list(tmp_path.iterdir()) == []
    publish("exactness_prefixes", LINES, "torch 2", whole=True)
    assert capsys.readouterr().out == 2 * ("\n".join(LINES) + "\n")
    (path,) = tmp_path.iterdir()
    head = Head.read(path)
    assert (head.title, head.what) == FILES["exactness_prefixes"]
    assert path.read_text().endswith("\n".join(LINES) + "\n")


def test_globs_that_leave_cases_out() -> None:
    assert is_whole(None)
    assert is_whole("*", None)
    assert not is_whole("*", "pp2*")


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_there(name: str) -> None:
    assert Head.read(measured.MEASURED / f"{name}.md").title == FILES[name][0]


def test_sizes_of_published_models_are_those_of_the_file() -> None:
    text = (measured.MEASURED / "model_sizes.md").read_text(encoding="utf-8")
    assert text.endswith("\n\n" + "\n".join(model_sizes.lines()) + "\n")
