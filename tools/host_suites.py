"""Run a host's own tests, unchanged, on megapack's functions.

    MEGAPACK_HOST_SOURCES=FOLDER tools/host_suites.py slime nemo_rl
    tools/host_suites.py verl --tree FOLDER/verl      # one host, from this source tree
    tools/host_suites.py slime --unpatched            # the host's own functions, to compare
    tools/host_suites.py slime -- -k static -x        # pytest's arguments

Releases have no tests, so a source tree is needed. Prints, for each host, what passed and failed,
and how often the replaced functions were called. Exit code: 1 if a test failed that is not known
to, if fewer ran than the suite has (pytest's arguments may leave some out), or if no replaced
function was called: then the tests were not megapack's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.hosts.patching.files import shipped_hosts
from tools.hosting.sources import NoSource, installed, source
from tools.hosting.suite_run import REPORT, SUITE, UNPATCHED, SuiteReport
from tools.hosting.suites import SUITES, Suite, suite_of

RUNNER = Path(__file__).parent / "hosting" / "suite_run.py"


def run_suite(
    suite: Suite, tree: Path, *, patched: bool = True, options: Sequence[str] = ()
) -> SuiteReport:
    """Run a host's tests in a process of their own; pytest's output goes to the screen.

    Raises:
        NoSource: the tree has no such tests.
    """
    absent = [test for test in suite.tests if not (tree / test.partition("::")[0]).is_file()]
    if absent:
        raise NoSource(f"{tree} has no {', '.join(absent)}; give --tree a source tree")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        # An empty configuration: the host's own may ask for plugins that are not installed.
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        command = [sys.executable, str(RUNNER), "-c", f"{folder}/pytest.ini", "--rootdir", "."]
        command += ["-q", "--disable-warnings", "-p", "no:cacheprovider"]
        # The hosts' conftest.py start clusters.
        command.append("--noconftest")
        environment = _environment(suite, tree, report, patched)
        subprocess.run([*command, *suite.tests, *options], cwd=tree, env=environment, check=False)
        if not report.is_file():
            return SuiteReport(failed=["pytest did not start"])
        return SuiteReport(**json.loads(report.read_text(encoding="utf-8")))


def _environment(suite: Suite, tree: Path, report: Path, patched: bool) -> dict[str, str]:
    folders = map(installed, suite.requirements)
    path = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        SUITE: suite.host,
        REPORT: str(report),
        UNPATCHED: "" if patched else "1",
    }
    # Processes that the tests start are patched, too.
    return {**environment, "MEGAPACK_PATCH": suite.host} if patched else environment


def problem_of(
    suite: Suite, report: SuiteReport, *, patched: bool = True, complete: bool = True
) -> str:
    """Why a run does not count as passed; empty if it does.

    Args:
        complete: no option of pytest left tests out, so that all of the suite must have run.
    """
    known = suite.known_failures if patched else {}
    failed = [test for test in report.failed if _name(test) not in known]
    if failed:
        return f"{len(failed)} failed: {', '.join(failed)}"
    if not report.passed:
        return "no test ran"
    num_run = report.passed + len(report.failed)
    # An older tree has fewer tests; none of them may be skipped.
    expected = min(suite.num_tests, num_run + report.skipped)
    if complete and num_run < expected:
        return f"only {report.passed} of {suite.num_tests} tests passed"
    if patched and not any(report.calls.values()):
        return "no replaced function was called"
    return ""


def _name(test: str) -> str:
    """`test_x` of `tests/test_a.py::TestB::test_x`."""
    return test.rpartition("::")[2]


def line_of(suite: Suite, report: SuiteReport, problem: str) -> str:
    """One line on a host."""
    calls = ", ".join(f"{n.rpartition('.')[2]} {k} calls" for n, k in report.calls.items())
    stubs = f"; stubs: {', '.join(report.stubbed)}" if report.stubbed else ""
    skipped = f", {report.skipped} skipped" if report.skipped else ""
    collected = report.passed + report.skipped + len(report.failed)
    fewer = f", {collected} collected" if collected < suite.num_tests else ""
    outcome = f"{report.passed} of {suite.num_tests} passed{skipped}{fewer}"
    known = [_name(test) for test in report.failed if _name(test) in suite.known_failures]
    reasons = "".join(f"; {name} fails: {suite.known_failures[name]}" for name in known)
    problem = f"; {problem}" if problem else ""
    return f"{suite.host}: {outcome}{reasons}; {calls or 'unpatched'}{stubs}{problem}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suites, and print one line for each."""
    args = _arguments(argv)
    lines = []
    failed = False
    for host in args.hosts:
        suite = suite_of(host)
        try:
            if host not in shipped_hosts() and not args.unpatched:
                raise NoSource(f"megapack has no patches for {host}")
            tree = args.tree.resolve() if args.tree else source(host)
            report = run_suite(suite, tree, patched=not args.unpatched, options=args.options)
        except NoSource as error:
            lines.append(f"{host}: not run: {error}")
            failed = True
            continue
        problem = problem_of(suite, report, patched=not args.unpatched, complete=not args.options)
        lines.append(line_of(suite, report, problem))
        failed = failed or bool(problem)
    print("\n".join(lines))
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [suite.host for suite in SUITES]
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hosts", nargs="+", choices=names, metavar="HOST", help=", ".join(names))
    parser.add_argument("--tree", type=Path, help="the host's source tree")
    parser.add_argument("--unpatched", action="store_true", help="on the host's own functions")
    args = parser.parse_args(words[:end])
    if args.tree and len(args.hosts) > 1:
        parser.error("--tree is one host's source tree; name one host")
    args.options = words[end + 1 :]
    return args


if __name__ == "__main__":
    sys.exit(main())
