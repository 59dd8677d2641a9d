"""Check every patch file against the sources of hosts: what fits, and what has moved.

    tools/host_matrix.py --trees FOLDER            # every source tree in a folder
    tools/host_matrix.py --releases                # the releases that the patches are tested with
    tools/host_matrix.py --latest --markdown       # the newest ones, as a table
    tools/host_matrix.py --releases --write        # also writes docs/measured/hosts_signatures.md

Nothing of a host is imported: signatures are read from its source (`hosting/read_signature.py`), so
no GPU and none of a host's dependencies are needed. Releases come from the package index as wheels
without dependencies. Exit code: 0 if everything fits, 1 if something has moved, 2 if there is
nothing to check or a release cannot be installed. Without arguments: --trees
$MEGAPACK_HOST_SOURCES if it is set, and --releases.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.hosts.patching.files import PatchFile, Replacement, shipped_files
from megapack.hosts.patching.target import accepts
from tools.hosting.read_signature import signatures
from tools.hosting.read_source import NotRead, Outside, Sources, package_of
from tools.hosting.sources import VARIABLE, NoSource, installed, newest
from tools.pages import measured

# Package on the index -> releases that the patches are tested with, and the Python of the newest.
RELEASES = {
    "verl": ("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    "areal": ("1.0.4",),
    "ms-swift": ("4.6.0",),
    "mcore-bridge": ("1.6.5",),
    "skyrl": ("0.3.0", "0.4.0"),
    "megatron-bridge": ("0.6.2",),
    "megatron-core": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
}
# Megatron-Core's newer wheels are for it; a wheel for every Python is found as well.
PYTHON = "3.12"

# Host -> the first version that has the name, and what stands in older ones' row.
FIRST = {"megatron_packing": ("0.20", "Megatron-Core has DpBalancedScheduler since 0.20")}
# Class -> what stands in the rows of sources without it, which have not moved.
ELSEWHERE = {"DefaultDynamicCPScheduler": "Megatron-Core has it on its dev branch only"}
# Host -> the first wheel with its package: Megatron-Core's older ones have no megatron.training.
FIRST_WHEEL = {"megatron_lm": "0.17"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A host's code in a folder."""

    label: str
    """Folder or release, for the table."""
    folders: tuple[Path, ...]
    """As on `sys.path`."""
    version: str | None
    """None: the source does not tell."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One patch and one source."""

    host: str
    source: str
    version: str
    target: str
    verdict: str
    moved: bool


def rows_of(source: Source, files: Sequence[PatchFile], beside: Sequence[Path] = ()) -> list[Row]:
    """One row for each name that patches replace in packages which the source has.

    Args:
        beside: folders with packages that the source imports.
    """
    site = Path(sysconfig.get_path("purelib"))
    code = Sources(source.folders, beside=[*beside, site])
    rows = []
    for host in sorted({file.host for file in files}):
        own = [file for file in files if file.host == host and _entries(code, file)]
        if not own:
            rows += _without_package(source, [file for file in files if file.host == host])
            continue
        (file,) = own
        entries = _entries(code, file)
        if file.is_for(source.version):
            rows += [
                _row(source, host, entry, *_verdict(code, source, host, entry)) for entry in entries
            ]
        else:
            # An old version has not moved.
            text = f"the patches are for versions from {file.since}"
            rows.append(_row(source, host, entries[0], text, False))
    return rows


def _without_package(source: Source, files: Sequence[PatchFile]) -> list[Row]:
    """A row if a release of the host has none of the packages that its patches are for."""
    distribution, _, version = source.label.partition("==")
    for file in files:
        if not version or file.distribution != distribution or not file.is_for(source.version):
            continue
        if _numbers(version) >= _numbers(FIRST_WHEEL.get(file.host)):
            entry = file.patches[0]
            text = f"`{source.label}` has no package {package_of(entry.module)}"
            return [_row(source, file.host, entry, text, True)]
    return []


def _entries(code: Sources, file: PatchFile) -> list[Replacement]:
    """What the file replaces in packages which the source has."""
    return [entry for entry in file.patches if code.has(package_of(entry.module))]


def _row(source: Source, host: str, entry: Replacement, verdict: str, moved: bool) -> Row:
    return Row(
        host=host,
        source=source.label,
        version=source.version or "?",
        target=entry.dotted,
        verdict=verdict,
        moved=moved,
    )


def _verdict(code: Sources, source: Source, host: str, entry: Replacement) -> tuple[str, bool]:
    """What the table says of one name, and whether it has moved."""
    package = package_of(entry.module)
    first, text = FIRST.get(host, ("", ""))
    if first and source.version and _numbers(source.version) < _numbers(first):
        return text, False
    try:
        found = signatures(code, entry.module, entry.name)
    except Outside as error:
        return f"not told: {error}", False
    except NotRead as error:
        elsewhere = ELSEWHERE.get(entry.name.partition(".")[0], "")
        return elsewhere or _moved(code, package, entry, str(error)), not elsewhere
    for signature in found:
        if not accepts(entry, signature):
            return _moved(code, package, entry, str(signature)), True
    return "fits", False


def _moved(code: Sources, package: str, entry: Replacement, found: str) -> str:
    text = f"expected {entry.expected}, found {found}"
    name = entry.name.rpartition(".")[2]
    others = [name for name in code.modules_with(package, name) if name != entry.module]
    if others and not found.startswith("("):
        text += f"; {name} is in {', '.join(others[:3])}"
    return text


def trees(folder: Path) -> Iterator[Source]:
    """The source trees in a folder, each with its packages at the top or below `src`."""
    for tree in sorted(path for path in folder.iterdir() if path.is_dir()):
        folders = tuple(path for path in (tree, tree / "src") if path.is_dir())
        yield Source(label=tree.name, folders=folders, version=version_of(tree))


def releases(requirements: Sequence[str]) -> Iterator[Source]:
    """Releases from the package index, such as `verl==0.9.1`.

    Raises:
        NoSource: one cannot be installed.
    """
    for requirement in requirements:
        folder = installed(requirement, python=PYTHON)
        version = requirement.partition("==")[2]
        yield Source(label=requirement, folders=(folder,), version=version)


# Files that state a version, the surest first.
_VERSIONS = (
    ("*.dist-info/METADATA", r"^Version: (\S+)"),
    ("*/version/version", r"^(\d\S*)"),
    ("setup.py", r"""^\s*version=["']([^"']+)"""),
    ("*/__init__.py", r"""^__version__ = ["']([^"']+)"""),
    ("*/version.py", r"""^__version__ = ["']([^"']+)"""),
)
# NVIDIA's files have MAJOR = 0, MINOR = 16, PATCH = 1, one a line.
_PARTS = (
    "megatron/core/package_info.py",
    "*/package_info.py",
    "src/megatron/bridge/package_info.py",
)


def version_of(tree: Path) -> str | None:
    """The version that a source tree states; None if none of its files does."""
    project = tree / "pyproject.toml"
    if project.is_file():
        stated = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if "version" in stated:
            return str(stated["version"])
    for pattern in _PARTS:
        for path in sorted(tree.glob(pattern)):
            parts = dict(
                re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", path.read_text(), re.MULTILINE)
            )
            if len(parts) == 3:
                return "{MAJOR}.{MINOR}.{PATCH}".format(**parts)
    for pattern, version in _VERSIONS:
        for path in sorted(tree.glob(pattern)):
            found = re.search(version, path.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return found[1]
    return None


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])


def as_text(rows: Sequence[Row]) -> str:
    """One line per name."""
    return "\n".join(f"{r.host}  {r.source}  {r.version}  {r.target}: {r.verdict}" for r in rows)


def as_markdown(rows: Sequence[Row]) -> str:
    """One line per host and result: each name that does not fit, and the sources it is so in."""
    sources: dict[tuple[str, str], list[str]] = {}
    packages: dict[str, set[str]] = {}
    for row in rows:
        packages.setdefault(row.host, set()).add(package_of(row.target))
    for (host, source), group in itertools.groupby(rows, lambda row: (row.host, row.source)):
        names = list(group)
        others = [f"`{row.target}`: {row.verdict}" for row in names if row.verdict != "fits"]
        fitting = len(names) - len(others)
        parts = [*([f"{fitting} of {len(names)} fit"] if fitting else []), *others]
        result = "; ".join(parts).replace("|", "\\|") if others else "fits"
        kind = "wheel" if "==" in source else "source"
        known = source if names[0].version == "?" else names[0].version
        if len(packages[host]) > 1:
            known = f"{package_of(names[0].target)} {known}"
        sources.setdefault((host, result), []).append(f"{kind} {known}")
    lines = ["| host | result | of |", "|---|---|---|"]
    for (host, result), found in sources.items():
        lines.append(f"| `{host}` | {result} | {'; '.join(_by_kind(found))} |")
    return "\n".join(lines)


def _by_kind(sources: Sequence[str]) -> Iterator[str]:
    """`source 0.15.3, 0.16.1`, `wheel 0.16.1`."""
    for kind, group in itertools.groupby(sources, lambda text: text.partition(" ")[0]):
        yield f"{kind} {', '.join(dict.fromkeys(text.partition(' ')[2] for text in group))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = _arguments(argv)
    files = shipped_files()
    rows = []
    try:
        given = [tree for folder in args.trees for tree in trees(folder)]
        beside = [folder for tree in given for folder in tree.folders]
        for source in [*given, *_releases(args)]:
            rows += rows_of(source, files, beside)
    except NoSource as problem:
        print(problem, file=sys.stderr)
        return 2
    if not rows:
        print("nothing to check: give --trees FOLDER, --releases or --latest", file=sys.stderr)
        return 2
    rows.sort(key=lambda row: (row.host, "==" in row.source, _numbers(row.version), row.source))
    print(as_markdown(rows) if args.markdown else as_text(rows))
    if args.write:
        measured.write(
            "hosts_signatures",
            "Do the patches fit the hosts' code?",
            "Signatures of what the patches replace, read from source trees and releases.",
            [as_markdown(rows)],
            measured.versions(),
        )
    moved = sum(row.moved for row in rows)
    hosts = {file.host for file in files} - {row.host for row in rows}
    without = f"; no source of {', '.join(sorted(hosts))}" if hosts else ""
    print(f"{len(rows)} names, {moved} moved{without}", file=sys.stderr)
    return 1 if moved else 0


def _releases(args: argparse.Namespace) -> Iterator[Source]:
    wanted = [f"{name}=={v}" for name, versions in RELEASES.items() for v in versions]
    requirements = wanted if args.releases else []
    if args.latest:
        requirements += [newest(name, python=PYTHON) for name in RELEASES]
    yield from releases(sorted(set(requirements)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--releases", action="store_true", help="that the patches are tested with")
    parser.add_argument("--latest", action="store_true", help="the newest release of each host")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--write", action="store_true", help="docs/measured/hosts_signatures.md")
    args = parser.parse_args(argv)
    if not (args.trees or args.releases or args.latest):
        args.releases = True
        args.trees = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    for folder in args.trees:
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder of source trees")
    return args


if __name__ == "__main__":
    sys.exit(main())
