"""Commands on plans with pieces of samples and split backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hand_made_orders import LENGTHS, PIECES, piece_row, split_plan

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a plan and its lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(split_plan().to_json())
    (tmp_path / "lengths.txt").write_text("".join(f"{n}\n" for n in LENGTHS))
    return tmp_path


def test_show_prints_pieces_and_orders(call: Call) -> None:
    _, out, _ = call("show", "plan.json")
    assert "; split samples: 1 in 3 pieces (44.6% of the tokens); split backwards: 20\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert lines[3:6] == [
        ["0", "1:2800[0:2800]", "2:1500"],
        ["1", "1:2400[2800:5200]", "1:900"],
        ["2", "2:2300[5200:7000]", "1:1000"],
    ]
    assert "!" not in out
    _, out, _ = call("show", "plan.json", "--rank", "0")
    assert "2300 tokens: samples 0,1; sample 0, tokens 5200 to 7000\n" in out
    assert "stage 1: 0F0 1F0 2F0 2B0 1B0 2W0 0B0 1W0 3F0" in out
    assert call("check", "plan.json", "lengths.txt")[0] == 0


def test_diff_sees_other_pieces_and_other_orders(call: Call) -> None:
    plan = split_plan()
    (step,) = plan.steps
    # The same micro-batches, cut at another token.
    cut = ((0, 2700), (2700, 5200), PIECES[2])
    first = [piece_row((0,), cut[0]), piece_row((0,), cut[1]), *step.ranks[0][2:]]
    lines = [line.replace("2W0 4F0", "4F0 2W0") for line in step.orders[1]]
    assert tuple(lines) != step.orders[1]
    other = replace(
        step, ranks=(tuple(first), step.ranks[1]), orders=(step.orders[0], tuple(lines))
    )
    Path("other.json").write_text(replace(plan, steps=(other,)).to_json())
    code, out, _ = call("diff", "plan.json", "other.json")
    assert code == 1
    places = [line.partition(": ")[0] for line in out.splitlines()[1:]]
    assert places == ["steps[0].ranks[0][0]", "steps[0].ranks[0][1]", "steps[0].orders[1][1]"]
    assert "2W0 4F0" in out
    assert "4F0 2W0" in out


def test_diff_with_megatrons_order(call: Call) -> None:
    plan = split_plan()
    (step,) = plan.steps
    Path("other.json").write_text(replace(plan, steps=(replace(step, orders=()),)).to_json())
    code, out, _ = call("diff", "plan.json", "other.json")
    assert code == 1
    assert "\nsteps[0].orders: [[" in out
    assert call("diff", "plan.json", "plan.json")[0] == 0
