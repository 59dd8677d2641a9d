"""A Transformer Engine that Megatron-Core cannot live with is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megapack.base.te import refuse_broken_te
from megapack.errors import ConfigError

pytestmark = pytest.mark.unit


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)


def test_a_missing_cudnn_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "raise RuntimeError('cudnn shared object\\nnot found.')")
    words = r"RuntimeError: cudnn shared object not found\.\).*nvidia-cudnn-cu13"
    with pytest.raises(ConfigError, match=words) as refused:
        refuse_broken_te()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source", ["", "raise ImportError('no torch extension')"])
def test_what_megatron_accepts_is_accepted(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, source)
    refuse_broken_te()
