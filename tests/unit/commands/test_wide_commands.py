"""Commands on plans whose micro-batches lie over several DP ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hand_made_plan import LENGTHS, wide_plan, wide_row

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a plan and its lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(wide_plan().to_json())
    (tmp_path / "lengths.txt").write_text("".join(f"{n}\n" for n in LENGTHS))
    return tmp_path


def test_show_prints_the_ranks_that_share(call: Call) -> None:
    _, out, _ = call("show", "plan.json")
    lines = [line.split() for line in out.splitlines()]
    assert (
        " 12 rows, 0 padding, 21666 tokens in 21669 row tokens; wide micro-batches: 1 over" in out
    )
    assert lines[3] == ["0", *["1:9000@0-3"] * 4]
    assert lines[4] == ["1", "1:700", "1:811", "1:4004@2-3", "1:4004@2-3"]
    assert "!" not in out
    _, out, _ = call("show", "plan.json", "--rank", "3")
    assert "1  1:4004@2-3, 4001 tokens: samples 1; ranks 2-3\n" in out
    assert call("check", "plan.json", "lengths.txt")[0] == 0


def test_diff_sees_that_a_row_lies_over_more_ranks(call: Call) -> None:
    plan = wide_plan()
    (step,) = plan.steps
    four = wide_row(1, width=4)
    ranks = tuple((rank[0], four, *rank[-2:]) for rank in step.ranks)
    other = replace(plan, steps=(replace(step, ranks=ranks),))
    Path("other.json").write_text(other.to_json())
    code, out, _ = call("diff", "plan.json", "other.json")
    assert code == 1
    assert [line.partition(": ")[0] for line in out.splitlines()[1:]] == [
        f"steps[0].ranks[{rank}][1]" for rank in range(4)
    ]
