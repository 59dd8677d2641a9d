"""Where a host's own code is: a source tree that the user names, or a release of the package index.

    MEGAPACK_HOST_SOURCES=/somewhere          a folder with source trees: slime/, miles/, ...
    MEGAPACK_HOST_RELEASES=skyrl==0.3.0,...   releases in place of the newest tested ones

Releases are installed without their dependencies, some of which are whole training stacks, each
into a folder of its own; hosts are then imported from there with `import_stubs` for the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "MEGAPACK_HOST_SOURCES"
VARIABLE_RELEASES = "MEGAPACK_HOST_RELEASES"

# Host -> its newest release on the package index that the patches are tested with.
RELEASES = {
    "verl": "verl==0.9.1",
    "areal": "areal==1.0.4",
    "ms_swift": "ms-swift==4.6.0",
    "mcore_bridge": "mcore-bridge==1.6.5",
    # 0.6 wants Python 3.12, and a Megatron-Core that has wheels for it only. Of 0.3 the adapters
    # are used, which other hosts train; the patches refuse it.
    "megatron_bridge": f"megatron-bridge=={'0.6.2' if sys.version_info >= (3, 12) else '0.3.1'}",
    "skyrl": "skyrl==0.4.0",
}
# Host -> the name of its folder below MEGAPACK_HOST_SOURCES.
FOLDERS = {
    "slime": "slime",
    "miles": "miles",
    "nemo_rl": "nemo-rl",
    "skyrl": "skyrl",
    "verl": "verl",
    "areal": "areal",
    "roll": "roll",
    "ms_swift": "ms-swift",
    "megatron_bridge": "megatron-bridge",
    "megatron_lm": "megatron-lm",
    "xtuner": "xtuner",
    "unirl": "unirl",
}


class NoSource(Exception):
    """A host's code is not here; says how to get it."""


def source(host: str) -> Path:
    """The folder that has the host's packages, for `sys.path`.

    A source tree below MEGAPACK_HOST_SOURCES comes first, then the release.

    Raises:
        NoSource: neither is there, or the release cannot be installed.
    """
    tree = Path(os.environ.get(VARIABLE, "")) / FOLDERS.get(host, host)
    if os.environ.get(VARIABLE) and tree.is_dir():
        return tree
    if host not in RELEASES:
        raise NoSource(
            f"{host} has no usable release; put its sources into ${VARIABLE}/{tree.name}"
        )
    return installed(release(host))


def release(host: str) -> str:
    """The release of a host to install, such as `verl==0.9.1`.

    MEGAPACK_HOST_RELEASES comes first, then the newest tested one.
    """
    newest_tested = RELEASES[host]
    name = newest_tested.partition("==")[0]
    for requirement in os.environ.get(VARIABLE_RELEASES, "").split(","):
        if requirement.partition("==")[0] == name:
            return requirement
    return newest_tested


def installed(requirement: str, *, python: str | None = None) -> Path:
    """The folder of a release, installed without dependencies on the first call.

    Args:
        python: a version like "3.12", to read a release that this Python cannot run; None: this
            one.
    """
    folder = Path(tempfile.gettempdir()) / "megapack-hosts" / requirement
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted installation is not taken for one.
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        _pip("--quiet", "--target", f"{partial}/new", *_for_python(python), requirement)
        try:
            os.rename(f"{partial}/new", folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
    return folder


def newest(name: str, *, python: str | None = None) -> str:
    """The newest release of a package on the index: `verl==0.9.1`.

    Raises:
        NoSource: there is none for this Python.
    """
    with tempfile.TemporaryDirectory() as empty:
        # --target: what is installed here does not count.
        options = ("--quiet", "--dry-run", "--report", "-", "--target", empty)
        report = json.loads(_pip(*options, *_for_python(python), name))
    return f"{name}=={report['install'][0]['metadata']['version']}"


def _for_python(version: str | None) -> list[str]:
    """Options for wheels of another Python, on a Linux with glibc 2.28 or newer."""
    if version is None:
        return []
    # pip would compare what a package requires with the Python that runs pip.
    options = ["--python-version", version, "--only-binary=:all:", "--ignore-requires-python"]
    for tag in ("manylinux_2_28_x86_64", "manylinux2014_x86_64"):
        options += ["--platform", tag]
    return options


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    outcome = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    if outcome.returncode:
        last = outcome.stderr.strip().splitlines()[-1:]
        raise NoSource(f"{arguments[-1]} cannot be installed: {' '.join(last)}")
    return outcome.stdout
