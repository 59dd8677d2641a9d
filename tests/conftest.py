"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:
    # A GPU machine may have only pytest, which is enough for tests/gpu.
    pass
else:
    # No deadline: a slow example on a busy machine is not a failure. The same examples in each run,
    # so that a change fails only for what it changed; MEGAPACK_RANDOM=1 draws new ones, each week.
    settings.register_profile(
        "megapack", deadline=None, derandomize=os.environ.get("MEGAPACK_RANDOM") != "1"
    )
    settings.load_profile("megapack")

# Tests start more processes; more threads than cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiling Megatron's small functions would take half of the time of models with experts.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Images of containers set it. Without byte code each process that a test starts would compile the
# sources of torch and Megatron anew: 23 CPU seconds in place of 5.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

REPO_ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the cases that a module names in `WEEKLY_CASES` with `weekly`.

    A case is the parameter `name` of a test, or the id of all its parameters.
    """
    for item in items:
        weekly = getattr(getattr(item, "module", None), "WEEKLY_CASES", ())
        case = getattr(item, "callspec", None)
        if weekly and case and not {case.id, case.params.get("name")}.isdisjoint(weekly):
            item.add_marker(pytest.mark.weekly)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Evaluation data outside of the repository; tests that need it are skipped without it."""
    folder = REPO_ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no evaluation data: {folder} is absent")
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; returns exit code, stdout and stderr."""

    from megapack import cli

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = cli.main(args)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        return code, *capsys.readouterr()

    return run
