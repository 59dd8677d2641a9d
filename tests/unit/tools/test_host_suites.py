"""A host's own tests run on megapack's functions, or the run does not count."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.host_suites import line_of, main, problem_of, run_suite
from tools.hosting.sources import NoSource
from tools.hosting.suite_run import SuiteReport
from tools.hosting.suites import Suite, suite_of

pytestmark = pytest.mark.unit

NAME = "slime.utils.dp_schedule.build_dp_schedule"
PROVIDER = "slime.utils.arguments.get_slime_extra_args_provider"
PROVIDERS = "def get_slime_extra_args_provider(add_custom_arguments=None): ..."
SCHEDULE = """
def build_dp_schedule(
    args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices
):
    return "host"
"""
# As slime's own: the test's module has the name before anything is called.
TESTS = """
from types import SimpleNamespace
import ray
import tools
from slime.utils.dp_schedule import build_dp_schedule

ARGS = SimpleNamespace(
    use_dynamic_batch_size=True, micro_batch_size=1, max_tokens_per_gpu=8, hidden_size=16,
    num_attention_heads=2, num_query_groups=2, vocab_size=32, ffn_hidden_size=64, num_experts=None,
    num_layers=2, kv_channels=8,
)
CONFIG = dict(dp_size=1, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)

def test_rows():
    assert tools.OWN
    found = build_dp_schedule(
        ARGS, CONFIG, [5, 5, 3], global_batch_size=3, rollout_indices=[0, 1, 2]
    )
    assert found == "host" or len(found[1][0]) == 2

def test_module():
    assert build_dp_schedule.__module__ == "megapack.hosts.slime"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with slime's names, a stubbed import, and a package `tools` of its own."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    files = {
        "slime/__init__.py": "",
        "slime/utils/__init__.py": "",
        "slime/utils/dp_schedule.py": SCHEDULE,
        "slime/utils/arguments.py": PROVIDERS,
        "slime/backends/__init__.py": "",
        "slime/backends/megatron_utils/__init__.py": "",
        "slime/backends/megatron_utils/initialize.py": "def init(args): ...",
        "tools/__init__.py": "OWN = True",
        "ray.py": "",
        "tests/test_dp_schedule.py": TESTS,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    return tmp_path


def test_the_tests_run_on_megapacks_functions(tree: Path) -> None:
    suite = suite_of("slime")
    report = run_suite(suite, tree)
    assert (report.passed, report.failed, report.replaced) == (2, [], [NAME])
    assert report.calls == {NAME: 1, PROVIDER: 0}
    assert problem_of(suite, report) == ""
    assert line_of(suite, report, "") == (
        "slime: 2 of 9 passed, 2 collected; build_dp_schedule 1 calls, "
        "get_slime_extra_args_provider 0 calls"
    )


def test_without_the_patch_they_run_on_the_hosts(tree: Path) -> None:
    report = run_suite(suite_of("slime"), tree, patched=False)
    assert report.failed == ["tests/test_dp_schedule.py::test_module"]
    assert (report.passed, report.replaced, report.calls) == (1, [], {})


def test_a_suite_that_calls_no_replaced_function_fails(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["slime", "--tree", str(tree), "--", "-k", "module"]
    assert main(arguments) == 1
    assert capsys.readouterr().out.endswith("calls; no replaced function was called\n")


def test_a_file_that_cannot_be_imported_fails(tree: Path) -> None:
    (tree / "tests/test_dp_schedule.py").write_text("import absent_package\n")
    report = run_suite(suite_of("slime"), tree)
    assert problem_of(suite_of("slime"), report) == "1 failed: tests/test_dp_schedule.py"


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (SuiteReport(passed=9, calls={"a.f": 0, "a.g": 3}), ""),
        (SuiteReport(passed=9, calls={"a.f": 0}), "no replaced function was called"),
        (SuiteReport(skipped=9, calls={"a.f": 1}), "no test ran"),
        (SuiteReport(passed=8, failed=["t::x"], calls={"a.f": 1}), "1 failed: t::x"),
        (SuiteReport(passed=8, failed=["t::C::known"], calls={"a.f": 1}), ""),
        (SuiteReport(passed=2, skipped=97, calls={"a.f": 3}), "only 2 of 9 tests passed"),
        (SuiteReport(passed=8, skipped=1, calls={"a.f": 3}), "only 8 of 9 tests passed"),
        # A tree with fewer tests, and one with more.
        (SuiteReport(passed=8, calls={"a.f": 3}), ""),
        (SuiteReport(passed=10, skipped=1, calls={"a.f": 3}), ""),
    ],
)
def test_when_a_run_counts(report: SuiteReport, problem: str) -> None:
    suite = Suite(host="slime", tests=(), num_tests=9, known_failures={"known": "a reason"})
    assert problem_of(suite, report) == problem


def test_options_may_leave_tests_out() -> None:
    report = SuiteReport(passed=2, skipped=7, calls={"a.f": 3})
    assert problem_of(suite_of("slime"), report, complete=False) == ""


def test_a_known_failure_is_printed_with_its_reason() -> None:
    suite = Suite(host="slime", tests=(), num_tests=9, known_failures={"known": "a reason"})
    report = SuiteReport(passed=8, failed=["t::known"], calls={"a.f": 3})
    line = "slime: 8 of 9 passed; known fails: a reason; f 3 calls"
    assert line_of(suite, report, problem_of(suite, report)) == line


def test_a_tree_without_the_tests_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoSource, match=r"has no tests/test_dp_schedule.py; give --tree"):
        run_suite(suite_of("slime"), tmp_path)
    assert main(["slime", "--tree", str(tmp_path)]) == 1
    assert "slime: not run: " in capsys.readouterr().out
