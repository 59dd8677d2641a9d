"""uv.lock has what setup.py and tools/constraints.txt ask for; tools/lock.sh writes it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit

Wanted = tuple[str, str, frozenset[str], str]
"""A package's name, its specifier, its extras, and the extra of megapack that asks for it."""


@pytest.fixture(scope="module")
def lock(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "uv.lock").read_text())


def wanted(line: str, extra: str) -> Wanted:
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    extras = frozenset(map(canonicalize_name, requirement.extras))
    return name, str(requirement.specifier), extras, extra


def asked_by_setup(root: Path) -> tuple[set[Wanted], set[str]]:
    """What setup.py's call of `setup` asks for, and its extras; setup.py is not run."""
    call = next(
        node
        for node in ast.walk(ast.parse((root / "setup.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    always = ast.literal_eval(values["install_requires"])
    extras = ast.literal_eval(values["extras_require"])
    found = {wanted(line, "") for line in always}
    found |= {wanted(line, extra) for extra, lines in extras.items() for line in lines}
    return found, set(extras)


def test_the_lock_has_what_setup_py_asks_for(repo_root: Path, lock: dict[str, Any]) -> None:
    (own,) = (package for package in lock["package"] if package["name"] == "megapack")
    locked = set()
    for entry in own["metadata"]["requires-dist"]:
        extra = re.fullmatch(r"extra == '(.+)'", entry.get("marker", ""))
        asks = ",".join(entry.get("extras", ()))
        line = f"{entry['name']}[{asks}]{entry.get('specifier', '')}"
        locked.add(wanted(line, extra[1] if extra else ""))
    asked, extras = asked_by_setup(repo_root)
    assert locked == asked, "setup.py has changed; run tools/lock.sh"
    assert set(own["metadata"]["provides-extras"]) == extras


def test_the_lock_has_the_tested_versions(repo_root: Path, lock: dict[str, Any]) -> None:
    versions = {(package["name"], package.get("version")) for package in lock["package"]}
    lines = (repo_root / "tools" / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {
        (canonicalize_name(pin.name), str(pin.specifier).removeprefix("==")) for pin in tested
    }
    assert len(pinned) > 20
    assert pinned - versions == set(), "tools/constraints.txt has changed; run tools/lock.sh"


def test_the_lock_names_the_public_index_only(repo_root: Path, lock: dict[str, Any]) -> None:
    sources = [package["source"] for package in lock["package"]]
    assert {source.get("registry", source.get("editable")) for source in sources} == {
        "https://pypi.org/simple",
        ".",
    }
    hosts = set(re.findall(r"\w+://[^/\"]*", (repo_root / "uv.lock").read_text()))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}
