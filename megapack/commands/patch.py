"""Show what the patches for a framework replace, and whether they fit the installed version."""

from __future__ import annotations

import argparse

from megapack.patching import check
from megapack.patching.files import load_patches, shipped_hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and its host."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    actions.add_parser("list", help="the frameworks that megapack has patches for")
    for name, summary in (
        ("check", "import the framework's modules and compare; exit code 1 if a name moved"),
        ("show", "each name, its expected signature, its replacement and why"),
        ("diff", "lines to add to a script, if replacing names is not enough"),
    ):
        action = actions.add_parser(name, help=summary)
        action.add_argument("host", help="a framework, or the path of a patch file, *.yaml")


def run(args: argparse.Namespace) -> int:
    """Print; 1 if `check` finds a problem."""
    if args.action == "list":
        print("\n".join(_summary(host) for host in shipped_hosts()))
        return 0
    return {"check": _check, "show": _show, "diff": _diff}[args.action](args.host)


def _summary(host: str) -> str:
    file = load_patches(host)
    installed = f"{file.version} is installed" if file.version else "no version found here"
    return f"{host:16} names: {len(file.patches)}; for {file.seen}; {installed}"


def _check(host: str) -> int:
    findings = check(host)
    print("\n".join(f"{found.target}: {found.problem or 'fits'}" for found in findings))
    return int(any(finding.problem for finding in findings))


def _show(host: str) -> int:
    file = load_patches(host)
    lines = [f"{file.host}: for {file.seen}"]
    for entry in file.patches:
        lines += ["", entry.dotted]
        lines += [f"    looks like {signature}" for signature in entry.signatures]
        lines += [f"    becomes {entry.replacement.replace(':', '.')}", f"    {entry.why}"]
    print("\n".join(lines))
    return 0


def _diff(host: str) -> int:
    file = load_patches(host)
    no_diff = f"{host} needs no change of its source: megapack run --patch {host} SCRIPT ARGS"
    print(file.diff.rstrip("\n") or no_diff)
    return 0
