"""Run a host's own tests on megapack's functions, in this process.

    MEGAPACK_SUITE=slime python tools/hosting/suite_run.py tests/test_dp_schedule.py

It is pytest with a plugin. Before the host is imported the plugin installs the stubs of its suite
and applies the patches. Afterwards it writes a `SuiteReport` to the file in MEGAPACK_SUITE_REPORT:
the outcomes, what was replaced, and how often the replacements were called in this process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

# "__mp_main__": a process that a test has spawned imports this file before anything else.
if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapack.hosts import patching
from megapack.hosts.patching.files import load_patches
from tools.hosting import import_stubs
from tools.hosting.suites import suite_of

SUITE = "MEGAPACK_SUITE"
REPORT = "MEGAPACK_SUITE_REPORT"
UNPATCHED = "MEGAPACK_SUITE_UNPATCHED"


@dataclass(kw_only=True)
class SuiteReport:
    """What a run of a host's tests showed."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    """Tests, and files that could not be collected."""
    replaced: list[str] = field(default_factory=list)
    """Names of the host that megapack's functions replaced."""
    calls: dict[str, int] = field(default_factory=dict)
    """Replaced name -> calls of its replacement."""
    stubbed: list[str] = field(default_factory=list)
    """Packages that are absent and were replaced by stubs."""


def prepare() -> tuple[str, ...]:
    """Make the host importable, and patch it; returns the packages that are stubs now."""
    suite = suite_of(os.environ[SUITE])
    stubbed = import_stubs.install(*suite.stubs)
    if suite.needs_device:
        from megapack import cpu

        cpu.enable()
    if suite.python_312:
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if not os.environ.get(UNPATCHED):
        patching.apply(suite.host)
    return stubbed


class Plugin:
    """Hooks of pytest."""

    def __init__(self) -> None:
        self.report = SuiteReport()

    def pytest_configure(self) -> None:
        """Replace before any test module is imported."""
        if not os.environ.get(UNPATCHED):
            for entry in load_patches(os.environ[SUITE]).patches:
                if entry.argument is None:
                    self._count(entry.replacement, entry.dotted)
        self.report.stubbed += prepare()

    def _count(self, replacement: str, target: str) -> None:
        """Count the calls of a function, or the objects of a class."""
        self.report.calls[target] = 0
        place, _, name = replacement.partition(":")
        module = importlib.import_module(place)
        original = getattr(module, name)
        if isinstance(original, type):
            # The class stays: tests ask for it, and hosts subclass it.
            original.__init__ = self._counted(original.__init__, target)  # type: ignore[misc]
        else:
            setattr(module, name, self._counted(original, target))

    def _counted(self, function: Any, target: str) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.report.calls[target] += 1
            return function(*args, **kwargs)

        return counted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test: set up, call, tear down."""
        if report.failed:
            self.report.failed.append(report.nodeid)
        elif report.skipped:
            self.report.skipped += 1
        elif report.when == "call":
            self.report.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A test file that cannot be imported."""
        if report.failed:
            self.report.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        states = patching.status()
        self.report.replaced = [status.target for status in states if status.state == "applied"]
        if REPORT in os.environ:
            text = json.dumps(dataclasses.asdict(self.report))
            Path(os.environ[REPORT]).write_text(text, encoding="utf-8")


def main() -> int:
    """Run pytest with the arguments of the command line, in the host's source tree."""
    sys.path[:] = [str(Path.cwd()), str(Path.cwd() / "src"), *sys.path[2:], sys.path[0]]
    return int(pytest.main(sys.argv[1:], plugins=[Plugin()]))


if __name__ in ("__main__", "__mp_main__"):
    # Hosts have packages `tools` and `tests` of their own.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        del sys.modules[name]
if __name__ == "__mp_main__":
    del sys.path[0]
    prepare()
if __name__ == "__main__":
    sys.exit(main())
