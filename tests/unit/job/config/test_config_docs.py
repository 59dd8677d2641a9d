"""docs/configuration.md is the tool's current output, and every key has a docstring."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from pathlib import Path
from types import ModuleType

import pytest

from megapack.base.field_docs import field_docs
from megapack.job.config.sections import TrainConfig

pytestmark = pytest.mark.unit


@pytest.fixture
def tool(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo_root / "tools"))
    return importlib.import_module("make_config_docs")


def test_the_page_is_up_to_date(tool: ModuleType, tmp_path: Path) -> None:
    tool.main(tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert written == tool.PAGE.read_text(encoding="utf-8"), "run tools/make_config_docs.py"


def test_every_key_has_a_docstring() -> None:
    sections = [TrainConfig, *filter(dataclasses.is_dataclass, _types())]
    missing = [
        f"{cls.__name__}.{field.name}"
        for cls in sections
        for field in dataclasses.fields(cls)
        if not field_docs(cls).get(field.name)
    ]
    assert len(sections) == 10
    assert missing == []


def _types() -> list[type]:
    return list(typing.get_type_hints(TrainConfig).values())
