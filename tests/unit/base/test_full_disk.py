"""On a full disk, commands and runs fail with one line and keep the existing files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megapack.cost.model import CostModel
from megapack.errors import CheckpointError
from megapack.job.train.folder import RunFolder
from megapack.plan.plan import Plan
from tests.run_folder import LENGTHS, make_plan, write_run
from tests.small_disk import PAGE, fill, small_disk

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64 * PAGE) as folder:
        yield folder


COMMANDS = [
    "plan many.txt --dp 2 --max-tokens-per-gpu 1024 -o {disk}/plan.json",
    "plot plan.json -o {disk}/plan.svg",
    "report run -o {disk}/run.html",
]


@pytest.mark.parametrize("num_pages", [0, 1])
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_whose_output_does_not_fit(
    line: str,
    num_pages: int,
    disk: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no free page, the write fails at once; with one, after half of the output."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    Path("plan.json").write_text(make_plan().to_json())
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    Path("many.txt").write_text(Path("lengths.txt").read_text() * 40)
    command = line.format(disk=disk).split()
    output = Path(command[-1])
    output.write_text("what was there")
    fill(disk, but_bytes=num_pages * PAGE)
    code, _, err = call(*command)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert f"{output}: cannot be written (No space left on device)" in err
    assert sorted(path.name for path in disk.iterdir()) == sorted(["ballast", output.name])
    assert output.read_text() == "what was there"


def test_a_run_resumes_after_its_disk_was_full(disk: Path) -> None:
    run = RunFolder(str(disk / "runs"), "run")
    for step in (1, 2):
        run.append_metrics({"step": step, "loss": 0.5})
        run.append_line("trace.jsonl", {"step": step, "events": [{}]})
    plan = make_plan()
    run.write_plan(plan, CostModel(), LENGTHS)
    ballast = fill(disk)
    attempts: dict[str, Callable[[], None]] = {
        "plan.json": lambda: run.write_plan(make_plan(1), CostModel(), LENGTHS),
        "config.yaml": lambda: run.write_text("config.yaml", "name: run\n"),
        "metrics.jsonl": lambda: run.append_metrics({"step": 3, "text": "x" * PAGE}),
        "trace.jsonl": lambda: run.append_line("trace.jsonl", {"step": 3, "text": "x" * PAGE}),
    }
    for name, attempt in attempts.items():
        says = rf"^{run.path / name} cannot be written \(No space left on device\); make room; "
        with pytest.raises(CheckpointError, match=says):
            attempt()
    assert Plan.from_json((run.path / "plan.json").read_text()) == plan
    with pytest.raises(OSError, match="No space left"):
        run.close()
    with pytest.raises(CheckpointError, match="No space left"):
        RunFolder(str(disk / "runs"), "run", continue_after=2)
    assert not list(run.path.glob("*.part"))
    ballast.unlink()
    again = RunFolder(str(disk / "runs"), "run", continue_after=2)
    again.append_metrics({"step": 3})
    again.close()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    traced = (run.path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in traced] == [1, 2]
