"""Write docs/configuration.md: every key of the main job's config, from its dataclasses.

python tools/make_config_docs.py [FILE]
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapack.base.field_docs import field_docs
from megapack.config.typed import describe
from megapack.job.config.sections import TrainConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

`megapack train CONFIG [section.key=value ...]` reads YAML into frozen dataclasses. An unknown key,
a value of the wrong type, or settings that do not fit together are one-line errors with the file,
the line and the nearest key. `CONFIG` is a path or the name of a config that megapack ships. The
resolved config is written to `runs/NAME/config.yaml`. `megapack train CONFIG --dry-run world=N`
checks a config without a GPU, see [commands.md](commands.md#dry-run).

```yaml
name: grpo_dp2_pp2_vpp2
layout: {pp: 2, vpp: 2}          # dp = number of ranks / (tp * pp * cp)
plan: {max_tokens_per_gpu: 16384, global_batch_size: 256}
data: {path: rollouts.jsonl, prompts_per_batch: 64}
objective: {kind: grpo, clip_high: 0.28}
optim: {lr: 1.0e-6}
train: {save_interval: 50, resume: auto}
```

From Python:

```python
from megapack.config import find_config, load_config
from megapack.job.config.sections import TrainConfig

path = find_config("configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
config = load_config(path, ["plan.max_tokens_per_gpu=4096"], TrainConfig)
```

`tools/make_config_docs.py` makes this page from the dataclasses.
"""


def main(path: Path) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's text."""
    hints = typing.get_type_hints(TrainConfig)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    sections = [name for name in names if dataclasses.is_dataclass(hints[name])]
    parts = [_INTRODUCTION, "## Top level\n", _table(TrainConfig, set(names) - set(sections))]
    for name in sections:
        summary = inspect.cleandoc(hints[name].__doc__ or "")
        parts += [f"## {name}\n", f"{summary}\n", _table(hints[name])]
    return "\n".join(parts)


def _table(cls: Any, names: set[str] | None = None) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|", *_rows(cls, names)]
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
            cells = (f"`{key}`", describe(hints[field.name]), default(field))
            yield f"| {' | '.join((*cells, _cell(docs[field.name])))} |"


def default(field: dataclasses.Field[Any]) -> str:
    """A field's default as YAML writes it."""
    if field.default is dataclasses.MISSING:
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
