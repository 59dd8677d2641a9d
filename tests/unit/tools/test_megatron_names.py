"""`tools/megatron_names.py` says in a line which name of Megatron-Core has moved."""

from __future__ import annotations

from pathlib import Path

import megatron.core
import pytest

from tools import megatron_names

pytestmark = pytest.mark.unit


def test_the_installed_megatron_has_all_names() -> None:
    assert megatron_names.moved_names(Path(megatron.core.__file__).parents[2]) == []


def test_an_absent_name_is_named(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "utils.py").write_text("def other() -> None: ...\n")
    lines = megatron_names.moved_names(tmp_path)
    assert any("megatron.core.utils has no get_model_config" in line for line in lines)
    assert any("there is no module megatron.core.optimizer" in line for line in lines)
