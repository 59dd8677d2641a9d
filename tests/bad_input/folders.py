"""Damaged run folders, checkpoints and input files, and outputs that cannot be written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megapack import CheckpointError, ConfigError, DataError, PlanError
from megapack.base.files import write_output
from megapack.config.cost_file import read_cost
from megapack.job.checkpoint.folders import (
    MANIFEST,
    Manifest,
    Position,
    check_space,
    find_checkpoint,
)
from megapack.job.data.lengths import Columns, read_length_file
from megapack.job.view.records import read_run
from megapack.layout import Layout
from megapack.plan import Plan
from tests.bad_input import Content, Row, row
from tests.run_folder import make_plan, write_run

Edit = Callable[[Path], object]
Damage = Callable[[Path, dict[str, Any]], object]
"""Changes a checkpoint, given its folder and the values of its manifest."""


def run_with(damage: Edit) -> Content:
    """A run's folder with a change made to it."""
    return lambda path: damage(write_run(path))


def cut(name: str, count: int) -> Edit:
    """Keep only the first `count` bytes of a file."""
    return lambda folder: os.truncate(folder / name, count)


def write(name: str, text: str) -> Edit:
    return lambda folder: (folder / name).write_text(text)


def _run(name: str, damage: Edit, error: Any, *words: str) -> Row:
    files = {"run": run_with(damage)}
    return Row(f"run {name}", partial(read_run, "run"), error, words, files)


RUN_ROWS = [
    row("run missing", partial(read_run, "run"), DataError, "metrics.jsonl", "give the folder"),
    _run(
        "without metrics",
        lambda folder: (folder / "metrics.jsonl").unlink(),
        DataError,
        *("metrics.jsonl: cannot be read (No such file", "give the folder"),
    ),
    _run(
        "metrics without a step",
        write("metrics.jsonl", '{"loss": 1}\n'),
        DataError,
        "line 1",
        "step",
    ),
    _run("step of text", write("metrics.jsonl", '{"step": "1"}\n'), DataError, "line 1"),
    _run("doubled key", write("metrics.jsonl", '{"step": 1, "step": 2}\n'), DataError, "twice"),
    _run("deep", write("metrics.jsonl", "[" * 10**5 + "\n{}\n"), DataError, "line 1", "too deep"),
    _run(
        "in latin-1",
        lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xe9\n"),
        DataError,
        *("metrics.jsonl", "0xe9", "give the folder"),
    ),
    _run("half a plan", cut("plan.json", 99), PlanError, "plan.json", "not a plan"),
    _run("without a plan", lambda f: (f / "plan.json").unlink(), PlanError, "plan.json", "give"),
    _run("negative lengths", write("lengths.txt", "5\n-1\n"), DataError, "line 2", "-1"),
    _run("incomplete trace", write("trace.jsonl", '{"step": 2}\n'), DataError, "line 1", "plan"),
]


def checkpoint_with(damage: Damage) -> Content:
    """A checkpoint with a change made to its files or manifest."""

    def make(path: Path) -> None:
        (path / "state").mkdir(parents=True)
        (path / "state" / "tensors").write_bytes(b"x" * 10)
        manifest = Manifest(
            position=Position(num_steps=1),
            config={},
            layout={},
            plan_digest="ab",
            samples_done_digest="cd",
            data_digest="ef",
            has_reference=False,
            megatron_core="0.16.1",
            files={"state/tensors": 10},
        )
        values = dataclasses.asdict(manifest)
        damage(path, values)
        if values:
            (path / MANIFEST).write_text(json.dumps(values))

    return make


def manifest_text(text: str | None) -> Damage:
    """Replace the manifest by this text; None removes it."""

    def damage(path: Path, values: dict[str, Any]) -> None:
        values.clear()
        if text is not None:
            (path / MANIFEST).write_text(text)

    return damage


def _checkpoint(name: str, damage: Damage, *words: str) -> Row:
    call = partial(find_checkpoint, "step-00000001", Path("none"))
    words = (*words, "resume")
    return Row(
        f"checkpoint {name}",
        call,
        CheckpointError,
        words,
        {"step-00000001": checkpoint_with(damage)},
    )


CHECKPOINT_ROWS = [
    _checkpoint("without manifest", manifest_text(None), "checkpoint.json", "is missing; set"),
    _checkpoint("cut off", manifest_text('{"format": 1,'), "not a checkpoint's manifest", "char"),
    _checkpoint("no object", manifest_text("[1]"), "not a checkpoint's manifest"),
    _checkpoint("doubled key", manifest_text('{"format": 1, "format": 1}'), "appears twice"),
    _checkpoint("deep", manifest_text("[" * 10**5), "too deep"),
    _checkpoint("newer", lambda path, values: values.update(format=99), "format 99", "reads 1"),
    _checkpoint("key missing", lambda path, values: values.pop("plan_digest"), "plan_digest"),
    _checkpoint("key too many", lambda path, values: values.update(more=1), "more"),
    _checkpoint("files a list", lambda path, values: values.update(files=["a"]), "files is ['a']"),
    _checkpoint(
        "steps negative",
        lambda path, values: values["position"].update(num_steps=-1),
        "num_steps is -1",
    ),
    _checkpoint(
        "steps text",
        lambda path, values: values["position"].update(num_steps="1"),
        "num_steps is '1'",
    ),
    _checkpoint(
        "file missing",
        lambda path, values: (path / "state" / "tensors").unlink(),
        *("state/tensors is missing", "another checkpoint"),
    ),
    _checkpoint(
        "file short",
        lambda path, values: os.truncate(path / "state" / "tensors", 9),
        *("state/tensors has 9 bytes of 10",),
    ),
    row(
        "checkpoint missing",
        partial(find_checkpoint, "runs/none", Path("none")),
        CheckpointError,
        *("train.resume=runs/none", "no complete checkpoint", "set"),
    ),
    row(
        "export on a full disk",
        partial(check_space, Path(), 2**60),
        CheckpointError,
        *("1099511627776 MiB", "make room"),
    ),
]


def _lengths(name: str, content: Content, *words: str, columns: Columns | None = None) -> Row:
    file, *_ = name.split(" ")
    call = partial(read_length_file, file, columns or Columns())
    return Row(f"file {name}", call, DataError, (file, *words), {file: content})


def long_line(path: Path) -> None:
    """A sparse file of 100 MB without a line break."""
    path.touch()
    os.truncate(path, 100_000_000)


LENGTH_FILE_ROWS = [
    _lengths("a.csv empty", "", "no samples", "give"),
    _lengths("a.csv of a NUL", b"length\n5\n\0\n", "it is binary (byte 9 is 0", "give text"),
    _lengths("a.csv in latin-1", b"length\n\xe9\n", "byte 7 (0xe9) is not UTF-8", "save"),
    _lengths("a.csv 10^30", "length\n1" + "0" * 30 + "\n", "line 2", "10000", "whole number"),
    _lengths("a.csv doubled column", "length,length\n5,6\n", "line 1", "'length' stands twice"),
    _lengths("a.csv long number", "9" * 10**5, "line 1", "999", "begin with a header"),
    _lengths("a.csv long line", long_line, "it is binary (byte 0 is 0", "give text"),
    _lengths("a.csv a cell of 1 MB", "length\n" + "x" * 10**6, "line 2", "131072"),
    _lengths("a.csv a pipe", os.mkfifo, "no samples", "give"),
    _lengths("a.csv a folder", Path.mkdir, "Is a directory", "give a file"),
    _lengths("a.csv a dangling link", lambda p: p.symlink_to("none"), "No such file", "give"),
    _lengths("a.csv a circle", lambda p: p.symlink_to(p), "symbolic links", "give a file"),
    _lengths("a.jsonl doubled key", '{"length": 5, "length": 6}', "'length' appears twice"),
    _lengths("a.jsonl deep", '{"length": ' + "[" * 10**5, "line 1", "too deep"),
    _lengths(
        "a.jsonl of long ids",
        '{"length": 5, "id": 9223372036854775808}',
        *("line 1", "id is 9223372036854775808", "give an int64"),
        columns=Columns(rollout="id"),
    ),
    _lengths("a.jsonl infinite", '{"length": Infinity}', "line 1", "inf"),
    _lengths("a.npy cut off", b"\x93NUMPY\x01\x00v\x00{'descr", "numpy.savetxt"),
]

COST_FILE_ROWS = [
    Row(f"cost file {name}", partial(read_cost, "c.yaml", Layout()), ConfigError, words, files)
    for name, words, files in [
        ("missing", ("c.yaml", "No such file", "give"), {}),
        ("a pipe", ("c.yaml", "cost has no default", "set"), {"c.yaml": os.mkfifo}),
        ("negative", ("c.yaml", "fixed=-1", "at least 0"), {"c.yaml": "cost: {fixed: -1}"}),
        ("NaN", ("cost.fixed is nan", "finite"), {"c.yaml": "cost: {fixed: .nan}"}),
        ("unknown key", ("cost.per_tokn", "did you mean"), {"c.yaml": "cost: {per_tokn: 1}"}),
        ("of a list", ("cost is a section", "set"), {"c.yaml": "cost: [1]"}),
        (
            "of two chunks",
            ("2 stage_weights", "pp*vpp=1"),
            {"c.yaml": "cost: {per_token: 1, stage_weights: [1, 1]}"},
        ),
    ]
]


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[], Plan]:
    payload = json.loads(make_plan().to_json())
    change(payload)
    return partial(Plan.from_json, json.dumps(payload))


def _plan(name: str, call: Callable[[], object], *words: str) -> Row:
    return Row(f"plan JSON {name}", call, PlanError, words, files={})


PLAN_FILE_ROWS = [
    _plan("empty", partial(Plan.from_json, ""), "not a plan in JSON", "char 0"),
    _plan("a list", partial(Plan.from_json, "[1]"), "plan must be an object"),
    _plan("of another version", _edited(lambda p: p.update(version=2)), "plan must be"),
    _plan("without steps", _edited(lambda p: p.pop("steps")), "plan must be"),
    _plan("samples of NaN", _edited(lambda p: p.update(num_samples=float("nan"))), "num_samples"),
    _plan("samples of text", _edited(lambda p: p.update(num_samples="8")), "num_samples"),
    _plan("dp of 10^30", _edited(lambda p: p["layout"].update(dp=10**30)), "dp=1000", "1048576"),
    _plan("an unknown rule", _edited(lambda p: p["policy"].update(balance="x")), "balance='x'"),
    _plan("ids above int64", _edited(lambda p: p.update(rollout_ids=[2**63])), "rollout_ids"),
    _plan("ids of floats", _edited(lambda p: p.update(rollout_ids=[1.5])), "rollout_ids"),
]


def _output(name: str, path: str, *words: str, files: dict[str, Content] | None = None) -> Row:
    call = partial(write_output, path, "text")
    return Row(f"output {name}", call, ConfigError, (*words, "set another -o"), files or {})


OUTPUT_ROWS = [
    _output("into a missing folder", "no/such/plan.json", "no/such/plan.json", "No such file"),
    _output("onto a folder", "there", "there", "Is a directory", files={"there": Path.mkdir}),
    _output("below a file", "a/b", "a/b", "Not a directory", files={"a": "text"}),
    _output("into a pipe", "pipe", "pipe", "No such device", files={"pipe": os.mkfifo}),
    _output("of a long name", "x" * 300, "xxx", "name too long"),
    _output("of a NUL", "a\0b", "null byte"),
    _output("without a name", "", "cannot be written"),
    _output("on a full disk", "/dev/full", "/dev/full", "No space left"),
]

ROWS = RUN_ROWS + CHECKPOINT_ROWS + LENGTH_FILE_ROWS + COST_FILE_ROWS + PLAN_FILE_ROWS + OUTPUT_ROWS
