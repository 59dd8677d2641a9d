"""megapack imports nothing that speaks with a network, and runs nothing that data could name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.unit.repository.test_imports import imports, modules

pytestmark = pytest.mark.unit

NETWORK = (
    "aiohttp asyncio boto3 fsspec ftplib grpc http httpx huggingface_hub imaplib nntplib paramiko "
    "poplib requests smtplib socket socketserver ssl telnetlib torch.hub torch.utils.model_zoo "
    "urllib urllib3 wandb webbrowser websockets xmlrpc zmq"
)
# Besides these, the ranks of a job speak through torch.distributed.
SPEAKS = {
    ("train.trackers", "wandb"): "train.trackers asks for it",
    ("ranks.board", "socket"): "the host's name",
    ("train.folder", "socket"): "the host's name",
    ("ranks.watchdog", "socket"): "the host's name",
    ("ranks.interrupt", "socket"): "a pair within the process, which takes a byte per signal",
}

# Module, call -> why what it runs is known.
RUNS = {
    ("__init__", "importlib.import_module"): "names of this package, from a table",
    ("cli", "importlib.import_module"): "commands of this package, from a table",
    ("commands.run", "runpy.run_module"): "the command line names it",
    ("commands.run", "runpy.run_path"): "the command line names it",
    ("doctor.runner", "subprocess.Popen"): "this Python, with the probes of this package",
    ("doctor.probes", "importlib.import_module"): "torch and what stands beside it",
    ("patching.target", "importlib.import_module"): "below megapack.hosts, which is checked",
    ("patching.registry", "importlib.import_module"): "`check` of a host, which the user named",
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
