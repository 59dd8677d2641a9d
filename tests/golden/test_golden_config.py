"""The config's keys, types and defaults stay as in config_keys.txt: YAML files depend on them.

MEGAPACK_WRITE_GOLDEN=1 rewrites the file.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapack.config.typed import describe
from megapack.job.config.sections import TrainConfig

pytestmark = pytest.mark.golden

FILE = Path(__file__).with_name("config_keys.txt")


def lines(cls: Any, section: str = "") -> Iterator[str]:
    """`section.key: type = default` of every key."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from lines(hints[field.name], f"{section}{field.name}.")
            continue
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        yield f"{section}{field.name}: {describe(hints[field.name])}{default}"


def test_keys_types_and_defaults_are_unchanged() -> None:
    found = list(lines(TrainConfig))
    if os.environ.get("MEGAPACK_WRITE_GOLDEN"):
        FILE.write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == FILE.read_text(encoding="utf-8").splitlines()
