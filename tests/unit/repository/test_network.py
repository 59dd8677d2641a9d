"""megapack imports no network libraries and runs no code that data could name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.unit.repository.test_imports import imports, modules

pytestmark = pytest.mark.unit

NETWORK = (
    "aiohttp asyncio boto3 fsspec ftplib grpc http httpx huggingface_hub imaplib mlflow nntplib "
    "paramiko poplib requests smtplib socket socketserver ssl swanlab telnetlib "
    "torch.hub torch.utils.model_zoo urllib urllib3 wandb webbrowser websockets xmlrpc zmq"
)
# Imports that are allowed, with their use. Ranks of a job also communicate by torch.distributed.
ALLOWED_IMPORTS = {
    ("job.train.trackers", "mlflow"): "only if train.trackers names it",
    ("job.train.trackers", "swanlab"): "only if train.trackers names it",
    ("job.train.trackers", "wandb"): "only if train.trackers names it",
    ("ranks.board", "socket"): "the host's name",
    ("job.train.folder", "socket"): "the host's name",
    ("ranks.watchdog", "socket"): "the host's name",
    (
        "ranks.interrupt",
        "socket",
    ): "a socket pair within the process; a signal writes one byte to it",
}

# Calls that run code by name, and where the name comes from.
ALLOWED_CALLS = {
    ("__init__", "importlib.import_module"): "names of this package, from a table",
    ("cli", "importlib.import_module"): "commands of this package, from a table",
    ("commands.run", "runpy.run_module"): "the command line names it",
    ("commands.run", "runpy.run_path"): "the command line names it",
    ("cpu.te.loader", "compile"): "Transformer Engine's own modules, with lines for the CPU",
    ("job.data.processes", "subprocess.Popen"): "this Python, with `serve` of a module here",
    ("doctor.runner", "subprocess.Popen"): "this Python, with the probes of this package",
    (
        "doctor.probes",
        "importlib.import_module",
    ): "torch, Transformer Engine and apex, by fixed names",
    (
        "hosts.patching.target",
        "importlib.import_module",
    ): "modules of megapack.hosts only, which is checked",
    ("hosts.patching.registry", "importlib.import_module"): "`check` of a host that the user named",
    ("te_finder", "importlib.import_module"): "this package's loader, by a fixed name",
    ("moved", "importlib.import_module"): "this package's modules, by the new names of a table",
}
# Calls that run code by name; a star matches any rest of a name.
BY_NAME = (
    "__import__ builtins.eval builtins.exec compile eval exec importlib.import_module os.exec* "
    "os.popen os.posix_spawn* os.spawn* os.system runpy.* subprocess.* torch.hub.*"
)


def calls(path: Path) -> Iterator[str]:
    """Dotted names that a module calls, as written in its source."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_no_network_library_is_imported() -> None:
    found = {
        (module, network)
        for module, path in modules().items()
        for imported in imports(path)
        for network in NETWORK.split()
        if imported.of(network)
    }
    assert found == set(ALLOWED_IMPORTS)


def test_calls_that_run_code_by_name_are_listed() -> None:
    found = {
        (module, name)
        for module, path in modules().items()
        for name in calls(path)
        if any(fnmatchcase(name, pattern) for pattern in BY_NAME.split())
    }
    assert found == set(ALLOWED_CALLS)
