"""Runs tests of a host's own repository with its patch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dist.spawn import ROOT
from tools.hosting.sources import NoSource, source


def run_suite(host: str, folder: Path, files: Sequence[str]) -> str:
    """Run files of a host's tests with the host's patch; skips where its source tree is absent.

    The files are copied into `folder`: their packages are called `tests`, as this one.

    Returns:
        pytest's own words: "99 passed", "1 failed, 98 passed".
    """
    try:
        tree = source(host)
    except NoSource as error:
        pytest.skip(str(error))
    missing = [name for name in files if not (tree / name).is_file()]
    if missing:
        pytest.skip(f"{host} here is a release without its tests: {missing[0]} is missing")
    for name in files:
        shutil.copy(tree / name, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"tests.hosts.steps.{host}"]
    command += ["-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MEGAPACK_PATCH": host},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    summary = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|error).*?) in ", done.stdout, re.M)
    assert summary, done.stdout[-3000:] + done.stderr[-2000:]
    return re.sub(r", \d+ warnings?", "", summary[-1])
