"""NVIDIA's apex is recognised without running any of the package."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from megapack.base.apex import find_apex, warn_of_other_apex

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], "none"),
        (["apex/__init__.py"], "other"),
        (["apex/__init__.py", "apex/normalization/__init__.py"], "nvidia"),
        (["amp_C.py"], "nvidia"),
    ],
)
def test_nvidias_apex_is_recognised_without_importing_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    files: list[str],
    found: str,
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("raise SystemExit('was run')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apex", "amp_C"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert find_apex() == found
    with caplog.at_level(logging.WARNING, logger="megapack.base.apex"):
        warn_of_other_apex()
    assert ("pip uninstall apex" in caplog.text) == (found == "other")
