"""Documented import paths of earlier versions load the modules where they are now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("megapack.patching", "megapack.hosts.patching"),
        ("megapack.config.model", "megapack.job.config.model"),
        ("megapack.data.rollouts", "megapack.job.data.rollouts"),
    ],
)
def test_an_old_path_is_the_new_module(old: str, new: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(new)


def test_statements_with_old_paths() -> None:
    """In a process of its own, where neither name has been imported: parents come first."""
    code = (
        "from megapack.data.advantages import group_advantages\n"
        "import megapack.config.sections\n"
        "import megapack.job.data.advantages, megapack.job.config.sections as sections\n"
        "assert megapack.config.sections is sections\n"
        "assert megapack.job.data.advantages.group_advantages is group_advantages\n"
        "assert megapack.config.load_config"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_as_absent_as_before() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"megapack\.job\.data\.nothing"):
        importlib.import_module("megapack.data.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"megapack\.nothing"):
        importlib.import_module("megapack.nothing")
