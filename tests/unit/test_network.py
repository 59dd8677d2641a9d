"""megapack reaches no network, runs nothing that data could name, and keeps to the umask."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.network_worker import COMMANDS, ROOT
from tests.unit.test_imports import imports, modules

pytestmark = pytest.mark.unit

NETWORK = (
    "aiohttp asyncio boto3 fsspec ftplib grpc http httpx huggingface_hub imaplib nntplib paramiko "
    "poplib requests smtplib socket socketserver ssl telnetlib torch.hub torch.utils.model_zoo "
    "urllib urllib3 wandb webbrowser websockets xmlrpc zmq"
)
# Besides these, the ranks of a job speak through torch.distributed.
SPEAKS = {("trackers", "wandb"): "train.trackers asks for it"}

# Module, call -> why what it runs is known.
RUNS = {
    ("__init__", "importlib.import_module"): "names of this package, from a table",
    ("cli", "importlib.import_module"): "commands of this package, from a table",
    ("commands.run", "runpy.run_module"): "the command line names it",
    ("commands.run", "runpy.run_path"): "the command line names it",
    ("doctor", "subprocess.Popen"): "this Python, with a probe of this package",
    ("doctor_probes", "importlib.import_module"): "torch and what stands beside it",
    ("patch_target", "importlib.import_module"): "below megapack.hosts, which is checked",
    ("patching", "importlib.import_module"): "`check` of a host, which the user named",
}
# A star stands for the rest of a name.
BY_NAME = (
    "__import__ builtins.eval builtins.exec compile eval exec importlib.import_module os.exec* "
    "os.popen os.posix_spawn* os.spawn* os.system runpy.* subprocess.* torch.hub.*"
)


def calls(path: Path) -> Iterator[str]:
    """Dotted names that a module calls, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_nothing_that_speaks_with_a_network_is_imported() -> None:
    found = {
        (module, network)
        for module, path in modules().items()
        for imported in imports(path)
        for network in NETWORK.split()
        if imported.of(network)
    }
    assert found == set(SPEAKS)


def test_what_runs_code_by_name_is_listed() -> None:
    found = {
        (module, name)
        for module, path in modules().items()
        for name in calls(path)
        if any(fnmatchcase(name, pattern) for pattern in BY_NAME.split())
    }
    assert found == set(RUNS)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the commands did."""
    folder = tmp_path_factory.mktemp("network")
    done = subprocess.run(
        [sys.executable, "-m", "tests.network_worker", str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_no_command_reaches_anything(ran: dict[str, Any]) -> None:
    """As root on a machine that has no network at all."""
    assert ran["codes"] == dict.fromkeys(COMMANDS, 0), ran["said"][-4000:]
    assert any("127.0.0.1" in event for event in ran["control"])
    assert ran["reached"] == []


def test_files_have_no_more_rights_than_the_umask_leaves(ran: dict[str, Any]) -> None:
    written = {Path(name).name for name in ran["modes"]}
    assert written >= {"plan.json", "run.html", "metrics.jsonl", "rank0.pt", ".metadata"}
    assert [name for name, mode in ran["modes"].items() if mode & 0o077] == []
