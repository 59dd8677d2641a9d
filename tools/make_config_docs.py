"""Write docs/configuration.md: every key of the main job's config, from its dataclasses.

python tools/make_config_docs.py [FILE]
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapack.base.field_docs import field_docs
from megapack.job.config.sections import TrainConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

`megapack train CONFIG [section.key=value ...]` reads YAML. `CONFIG` is a path or the name of a
config that megapack ships (`megapack train --list`). A run needs few keys:

```yaml
name: grpo
layout: {pp: 2, vpp: 2}          # dp = number of ranks / (tp * pp * cp)
model: {hf_path: models/Qwen3-4B, dtype: bf16}
data: {path: rollouts.jsonl, prompts_per_batch: 64}
plan: {max_tokens_per_gpu: 16384, num_steps: 2}
objective: {kind: grpo, clip_high: 0.28, advantage_norm: group-std}
optim: {lr: 1.0e-6}
train: {save_interval: 50, resume: auto}
```

An unknown key, a value of the wrong type, or settings that do not fit together end the command with
one line, which names the file, the line and the nearest key. The resolved config is written to
`runs/NAME/config.yaml`. `megapack train CONFIG --dry-run world=N` checks a config without a GPU:
[commands](commands.md#dry-run).

## The keys that you set

| key | set it to |
|---|---|
| `name` | the run's name; its folder is `runs/NAME` |
| `layout.tp`, `layout.pp`, `layout.vpp` | how the model is split, as `megapack tune` finds |
| `model.hf_path` | the folder of your model |
| `model.dtype` | `bf16` on a GPU |
| `data.path` | your data: [columns](data_and_resume.md#columns) |
| `data.prompts_per_batch` | prompts of a batch, which is planned as a whole |
| `plan.max_tokens_per_gpu` | a row's budget, from `megapack tune`; halve it if memory runs out |
| `plan.num_steps` | optimizer steps per batch; with one, the default, nothing is clipped |
| `objective.kind`, `.advantage_norm`, `.loss_weighting` | the loss: [by name](losses.md#methods) |
| `optim.lr` | the learning rate |
| `optim.distributed_optimizer` | `true` on several GPUs |
| `train.save_interval` | steps between checkpoints |

By the names of Megatron-LM's arguments:

| Megatron-LM | here |
|---|---|
| `--micro-batch-size` | `plan.max_tokens_per_gpu`, or `plan.micro_batch_size` |
| `--global-batch-size` | `plan.global_batch_size`, in rollouts |
| `--num-layers-per-virtual-pipeline-stage N` | `layout.vpp`: layers / (pp * N) |
| `--tensor-model-parallel-size` and its like | `layout.tp`, `pp`, `cp`, `ep`, `etp` |
| `--recompute-granularity` | `model.recompute` |
| `--use-distributed-optimizer`, `--overlap-grad-reduce` | `optim`, the same names |

## From Python

```python
from megapack.config import find_config, load_config
from megapack.job.config.sections import TrainConfig

path = find_config("configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
config = load_config(path, ["plan.max_tokens_per_gpu=4096"], TrainConfig)
```

## Every key

The column *value* has the default in `code`, and then the other choices. A type alone, such as
*integer*, means that the default is null. `tools/make_config_docs.py` makes this page.
"""

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
# What a section's docstring leaves to other pages.
_PAGES = {
    "layout": "[Concepts](concepts.md) explains the names.",
    "plan": "[Planning options](planning_options.md) says what each costs.",
    "model": "Layers G and M are those of [hybrid models](hybrid.md).",
    "data": "[Data files and checkpoints](data_and_resume.md) has the details.",
    "objective": "[Losses](losses.md) has the formulas.",
    "critic": "[Critics](critics.md) has the details.",
    "optim": "[Muon](muon.md) explains the keys `muon_*`.",
    "train": "[Data files and checkpoints](data_and_resume.md#checkpoints) has the details.",
}


def main(path: Path) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's text."""
    hints = typing.get_type_hints(TrainConfig)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    sections = [name for name in names if dataclasses.is_dataclass(hints[name])]
    parts = [_INTRODUCTION, _table(TrainConfig, set(names) - set(sections))]
    for name in sections:
        summary = inspect.cleandoc(hints[name].__doc__ or "").partition("\n\n")[0]
        text = textwrap.fill(f"{summary} {_PAGES.get(name, '')}".strip(), 100)
        parts += [f"## {name}\n", f"{text}\n", _table(hints[name])]
    return "\n".join(parts)


def _table(cls: Any, names: set[str] | None = None) -> str:
    rows = ["| key | value | |", "|---|---|---|", *_rows(cls, names)]
    return "\n".join(rows) + "\n"


def _rows(cls: Any, names: set[str] | None = None, prefix: str = "") -> Iterator[str]:
    """A row per key; a section within a section has rows for its own keys."""
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]) and names is None:
            yield from _rows(hints[field.name], prefix=f"{key}.")
        elif names is None or field.name in names:
            cells = (f"`{key}`", value(hints[field.name], field.default), docs[field.name])
            yield f"| {' | '.join(map(_cell, cells))} |"


def value(hint: Any, default: Any) -> str:
    """A key's default, and its other choices; its type alone if the default is null.

    >>> value(Literal["adam", "muon"], "adam")
    '`adam`, muon'
    >>> value(int | None, 2), value(int | None, None), value(int, 2)
    ('`2`, null', 'integer', '`2`')
    """
    options = _options(hint)
    if default is None:
        return ", ".join(dict.fromkeys(name for name, _ in options if name != "null"))
    if default is dataclasses.MISSING:
        return f"required {options[0][0]}"
    listed = list(default) if isinstance(default, tuple) else default
    text = listed if isinstance(listed, str) else json.dumps(listed)
    others = [name for name, is_choice in options if is_choice and name != text]
    return ", ".join((f"`{text}`", *others))


def _options(hint: Any) -> list[tuple[str, bool]]:
    """Choices of a type, and whether each is to be named beside a default."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [option for arg in args for option in _options(arg)]
    if origin is typing.Literal:
        return [(str(arg), True) for arg in args]
    if origin is tuple:
        return [(f"list of {name}", is_choice) for name, is_choice in _options(args[0])]
    if origin is dict:
        return [("mapping", False)]
    return [("null", True)] if hint is type(None) else [(_TYPES[hint], False)]


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
