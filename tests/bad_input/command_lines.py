"""Bad command lines, which end with exit code 2, and edited plans for `check`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bad_input import Content, Line, line
from tests.bad_input.folders import long_line, run_with
from tests.run_folder import LENGTHS, make_plan

CONFIG = "name: x\ndevice: cpu\nplan: {max_tokens_per_gpu: 64}\n"
CSV = "length\n5\n9\n3\n"
CHAT = [{"role": "user", "content": "a"}]
SAMPLE = {"prompt_ids": [1, 2], "response_ids": [3]}


def _config(text: str | bytes, *words: str, overrides: str = "") -> Line:
    return line(f"train c.yaml {overrides} --dry-run world=1", *words, c_yaml=text)


def _bomb() -> str:
    """YAML aliases nested nine levels deep: 10^9 strings if expanded."""
    lists = [f"a0: &a0 [{', '.join(['x'] * 9)}]"]
    lists += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
    return "\n".join(lists)


CONFIG_LINES = [
    _config(_bomb(), "c.yaml:2", "aliases", "write the value out"),
    _config("name: !!python/object/apply:os.system [touch a]", "c.yaml:1", "tags are refused"),
    _config(CONFIG + "seeed: 1", "c.yaml:4", "unknown key seeed", "did you mean seed?"),
    _config(CONFIG + "plan: {}", "c.yaml:4", "key plan appears twice", "keep one"),
    _config(CONFIG + "seed: many", "seed is 'many'", "expected an integer"),
    _config(CONFIG + "model: [1]", "model is a section, got a list of 1", "set keys"),
    _config(CONFIG + "optim: {lr: .nan}", "optim.lr is nan", "a finite number"),
    _config(CONFIG + "optim: {lr: -1}", "optim.lr is -1", "set 0 or more"),
    _config("- name", "c.yaml:1", "a list of 1", "key: value"),
    _config("", "name has no default", "set it"),
    _config(CONFIG + "---\nname: y", "expected a single document"),
    _config(b"\x89PNG\r\n\xff", "byte 0 (0x89) is not UTF-8", "save the file"),
    _config(b"name: \x00", "c.yaml", "it is binary (byte 6 is 0", "give text"),
    _config(CONFIG + "model: " + "[" * 10**4, "nested deeper than 16"),
    _config(CONFIG, "layout.pp is 0", "set 1", overrides="layout.pp=0"),
    _config(CONFIG, "layout.ppp", "did you mean layout.pp?", overrides="layout.ppp=2"),
    _config(CONFIG, "'nonsense'", "section.key=value", overrides="nonsense"),
    _config(CONFIG, "tags are refused", overrides="name='!!str y'"),
    _config(CONFIG, "259", "set 259 or more", overrides="model.vocab_size=100"),
    _config(CONFIG, "dp * tp * pp * cp", "2 ranks", "has 1", overrides="layout.dp=2"),
    _config(
        CONFIG,
        *("num_experts=3", "layout.ep=2", "set a multiple"),
        overrides="model.num_experts=3 layout.ep=2",
    ),
    _config(CONFIG, "['wandb', 'wandb']", "once", overrides="train.trackers=[wandb,wandb]"),
    line("train none.yaml", "none.yaml: no such file", "train --list"),
    line("train folder --dry-run world=1", "folder: no such file", folder=Path.mkdir),
    line("train pipe --dry-run world=1", "pipe: no such file", pipe=os.mkfifo),
    line("train c.yaml --dry-run world=0", "'world=0'", "set world=N", c_yaml=CONFIG),
    line("train c.yaml --json", "--json is for dry runs", "world=N", c_yaml=CONFIG),
]


def _rows(content: Content | dict[str, Any], *words: str, overrides: str = "") -> Line:
    text = json.dumps(content) if isinstance(content, dict) else content
    args = f"train c.yaml data.path=r.jsonl {overrides} --dry-run world=1"
    return Line(args, words, {"c.yaml": CONFIG, "r.jsonl": text})


DATA_LINES = [
    _rows("", "r.jsonl has no sample", "give at least one"),
    _rows(json.dumps(SAMPLE) + "\n" + json.dumps(SAMPLE)[:-5], "r.jsonl:2", "cut off"),
    _rows(b'{"prompt": "\xff"}', "r.jsonl:1", "byte 12 (0xff) is not UTF-8"),
    _rows(b"\0" * 99, "r.jsonl: it is binary", "give text"),
    _rows(long_line, "r.jsonl: it is binary", "give text"),
    _rows(
        {"messages": [{"role": "user", "content": "a"}]},
        "needs a chat template",
        "set data.tokenizer=hf",
    ),
    _rows(SAMPLE, "needs a folder", "set data.tokenizer_path", overrides="data.tokenizer=hf"),
    _rows({**SAMPLE, "reward": 1}, "3 tokens", "max_length is 2", overrides="data.max_length=2"),
    line(
        "train c.yaml data.path=none.jsonl --dry-run world=1",
        *("none.jsonl", "cannot be read", "check data.path"),
        c_yaml=CONFIG,
    ),
    line(
        "train c.yaml data.path=pipe --dry-run world=1",
        *("pipe", "not a regular file", "set data.path"),
        c_yaml=CONFIG,
        pipe=os.mkfifo,
    ),
    line(
        "train c.yaml data.path=folder --dry-run world=1",
        *("folder", "no file named *.jsonl", "check data.path"),
        c_yaml=CONFIG,
        folder=Path.mkdir,
    ),
]


def _plan(args: str, *words: str) -> Line:
    return line(f"plan a.csv {args}", *words, a_csv=CSV)


PLAN_LINES = [
    _plan("", "neither of --max-tokens-per-gpu", "set --max-tokens-per-gpu=9 or more"),
    _plan("--max-tokens-per-gpu 8 -o -", "-o -", "set a file name"),
    _plan("--max-tokens-per-gpu 8 -o a.csv", "a.csv is the input itself", "set another -o"),
    _plan("--max-tokens-per-gpu 8 -o no/p.json", "no/p.json", "set another -o"),
    _plan("--max-tokens-per-gpu 8 -o /dev/full", "/dev/full", "No space left", "set another -o"),
    _plan("--max-tokens-per-gpu 1 --cp 2", "--max-tokens-per-gpu=1", "4 tokens", "set it to 2"),
    _plan("--max-tokens-per-gpu nan", "'nan'", "set an integer"),
    _plan("--max-tokens-per-gpu 8 --dp -1", "dp=-1", "at least 1"),
    _plan("--max-tokens-per-gpu 8 --vpp 2", "--vpp=2 with --pp=1", "set pp > 1"),
    _plan("--max-tokens-per-gpu 8 --ep 2", "ep=2", "set ep to a divisor"),
    _plan("--max-tokens-per-gpu 8 --num-steps 9", "--num-steps=9", "3 rollouts", "at most 3"),
    _plan("--max-tokens-per-gpu 8 --cost c.yaml", "c.yaml", "No such file", "give"),
    _plan("--max-tokens-per-gpu 8 --rollout-column id", "'id'", "length", "name one"),
    line("plan none.csv --max-tokens-per-gpu 8", "none.csv", "No such file", "give"),
    line("plan pipe --max-tokens-per-gpu 8", "pipe", "no samples", "give", pipe=os.mkfifo),
    line("tune a.csv --gpus 0", "needs a model", "set --model", a_csv=CSV),
]


def write_plan(path: Path) -> None:
    """Write a sound plan."""
    path.write_text(make_plan().to_json())


def edited(change: Callable[[dict[str, Any]], object]) -> Content:
    """A plan in JSON with a change made to it."""

    def make(path: Path) -> None:
        payload = json.loads(make_plan().to_json())
        change(payload)
        path.write_text(json.dumps(payload))

    return make


def _show(content: Content, *words: str) -> Line:
    return Line("show p.json", words, {"p.json": content})


FILE_LINES = [
    line("show none.json", "none.json", "No such file", "give a plan.json"),
    line("show folder", "folder", "Is a directory", "give a plan.json", folder=Path.mkdir),
    line("show pipe", "pipe: not a plan in JSON", "give the plan", pipe=os.mkfifo),
    _show("", "not a plan in JSON"),
    _show(b"\xff", "byte 0 (0xff) is not UTF-8", "give a plan.json"),
    _show("[" * 10**5, "not a plan"),
    _show('{"layout": {', "not a plan in JSON", "char 12"),
    _show('{"layout": ' * 10**5, "brackets too deep"),
    line("simulate p.json --step 9", "step 9 of 2", "set --step", p_json=write_plan),
    line("show p.json --step 0 --rank 9", "rank 9 of 2", "set --rank", p_json=write_plan),
    line(
        "report p.json",
        *("no steps", "make the plan again"),
        p_json=edited(lambda p: p.update(steps=[])),
    ),
    line("report none", "none: no such file", "give a plan.json, or the folder of a run"),
    line("report run -o -", "-o -", "set a file name", run=run_with(lambda folder: None)),
    line("report run -o no/r.html", "no/r.html", "set", run=run_with(lambda folder: None)),
    line(
        "report run",
        *("metrics.jsonl", "line 1", "give the folder"),
        run=run_with(lambda folder: (folder / "metrics.jsonl").write_text("{}\n")),
    ),
    line("report folder", "metrics.jsonl", "give the folder of a run", folder=Path.mkdir),
    line("plot p.json -o p.bmp", "p.bmp", "name it", p_json=write_plan),
    line("plot p.json -o p.json", "p.json is the input", "another -o", p_json=write_plan),
    line("diff p.json none.json", "none.json", "give a plan.json", p_json=write_plan),
    line("run", "nothing to run", "give a script"),
    line("run none.py", "none.py: no such script", "give its path"),
    line("fly", "'fly'", "--help"),
]

LINES = CONFIG_LINES + DATA_LINES + PLAN_LINES + FILE_LINES


def first_row(change: Callable[[list[Any]], object]) -> Content:
    """A plan with a change made to its first micro-batch."""
    return edited(lambda plan: change(plan["steps"][0]["ranks"][0][0]))


def add_row_token(row: list[Any]) -> None:
    row[1] += 1


def add_real_token(row: list[Any]) -> None:
    row[2] += 1


FINDINGS: list[tuple[str, Content, tuple[str, ...]]] = [
    ("a sample twice", first_row(lambda row: row[0].append(row[0][0])), ("2 times",)),
    ("a sample missing", first_row(lambda row: row[0].pop()), ("0 times",)),
    ("an unknown sample", first_row(lambda row: row[0].append(99)), ("99", "16")),
    ("other tokens", first_row(add_real_token), ("invariant 4",)),
    ("a longer row", first_row(add_row_token), ("invariant 5",)),
    ("a smaller budget", edited(lambda p: p.update(max_tokens_per_gpu=100)), ("invariant 4",)),
    ("a rank too few", edited(lambda p: p["steps"][0]["ranks"].pop()), ("1 ranks", "dp=2")),
]
"""Plans of valid form and wrong contents, which `check` reports with exit code 1."""

FINDING_LENGTHS = "".join(f"{length}\n" for length in LENGTHS)
