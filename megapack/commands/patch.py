"""Show what the patches for a framework replace, and whether they fit the installed version."""

from __future__ import annotations

import argparse

from megapack.base.known_warnings import quiet_known_warnings
from megapack.hosts.patching import check
from megapack.hosts.patching.files import PatchFile, patch_set, read_patches, shipped_files
from megapack.hosts.startup import VARIABLE

EXAMPLE = "megapack patch show slime"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and its host."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    actions.add_parser("list", help="the frameworks that megapack has patches for")
    for name, summary in (
        ("check", "import the framework's modules and compare; exit code 1 if a name moved"),
        ("show", "what is on, what is off, and each name, its signature, its replacement and why"),
        ("diff", "lines to add to a script, if replacing names is not enough"),
    ):
        action = actions.add_parser(name, help=summary)
        action.add_argument("host", help="a framework, or the path of a patch file, *.yaml")


def run(args: argparse.Namespace) -> int:
    """Print; 1 if `check` finds a problem."""
    if args.action == "list":
        print("\n".join(map(_summary, shipped_files())))
        return 0
    return {"check": _check, "show": _show, "diff": _diff}[args.action](args.host)


def _summary(file: PatchFile) -> str:
    found = f"{file.version} is installed" if file.version else "no version found here"
    brings = f"; brings {', '.join(file.brings)}" if file.brings else ""
    state = f"{file.problem or found}{brings}"
    return f"{file.host:16} names: {len(file.patches)}; for {file.seen}; {state}"


def _check(host: str) -> int:
    quiet_known_warnings()
    findings = check(host)
    print("\n".join(f"{found.target}: {found.problem or 'fits'}" for found in findings))
    return int(any(finding.problem for finding in findings))


def _show(host: str) -> int:
    first, *brought = patch_set([host], any_version=True)
    lines = _names(first, "on")
    for file in brought:
        without = f"{first.host},-{file.host}"
        lines += ["", *_names(file, f"on, brought by {first.host}; off with {VARIABLE}={without}")]
    for each in first.optional:
        state = f"off; on with {VARIABLE}={first.host},{each.host}\n    {each.why}"
        lines += ["", *_names(read_patches(each.host), state)]
    print("\n".join(lines))
    return 0


def _names(file: PatchFile, state: str) -> list[str]:
    """What is replaced by a file, and whether it is."""
    if file.problem:
        state = f"cannot be applied: {file.problem}"
    lines = [f"{file.host}: {state}", f"    for {file.seen}"]
    for entry in file.patches:
        lines += ["", f"  {entry.dotted}"]
        lines += [f"    looks like {signature}" for signature in entry.signatures]
        change = "becomes" if entry.argument is None else f"tells its {entry.argument} to"
        lines += [f"    {change} {entry.replacement.replace(':', '.')}", f"    {entry.why}"]
    return lines


def _diff(host: str) -> int:
    file = patch_set([host])[0]
    no_diff = f"{host} needs no change of its source: megapack run --patch {host} SCRIPT ARGS"
    print(file.diff.rstrip("\n") or no_diff)
    return 0
