"""Files of docs/measured: a table each, with the command, the date and the commit that made it.

    # Title

    What was measured, in a sentence or two.

    - command: `python tools/exactness.py --prefixes '*'`
    - date: 2026-05-31
    - commit: 1234567
    - with: megatron-core 0.16.1, torch 2.13.0

    | layout | gradient |
    ...

Tools write them with `write`; `tools/make_what_was_run.py` makes a page of their heads. A page that
quotes a number links to the file that has it, in the same section; a test compares the two.
"""

from __future__ import annotations

import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"

_FACT = re.compile(r"^- (command|date|commit|with): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Head:
    """What stands above the table of a file."""

    title: str
    what: str
    command: str
    date: str
    """ISO 8601, the day on which the command ended."""
    commit: str
    with_versions: str
    """Packages, Python and machine, in words."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError, with the file's name, if a part is missing."""
        top = path.read_text(encoding="utf-8").split("\n|", 1)[0]
        title, _, rest = top.partition("\n")
        facts = dict(_FACT.findall(rest))
        missing = {"command", "date", "commit", "with"} - set(facts)
        what = _FACT.split(rest, maxsplit=1)[0].strip()
        if missing or not title.startswith("# ") or not what:
            missing_text = ", ".join(sorted(missing)) or "a title, or what was measured"
            raise ValueError(f"{path.name} does not say {missing_text}")
        command = facts["command"].strip("`")
        return cls(title[2:], what, command, facts["date"], facts["commit"], facts["with"])

    def text(self) -> str:
        return (
            f"# {self.title}\n\n{self.what}\n\n- command: `{self.command}`\n- date: {self.date}\n"
            f"- commit: {self.commit}\n- with: {self.with_versions}\n"
        )


def versions(*packages: str) -> str:
    """Such as "megatron-core 0.16.1, Python 3.11.7"."""
    return ", ".join([*(f"{p} {version(p)}" for p in packages), f"Python {python_version()}"])


def this_command() -> str:
    """The command that runs now, as one types it in the repository."""
    tool = Path(sys.argv[0]).resolve()
    name = tool.relative_to(ROOT).as_posix() if tool.is_relative_to(ROOT) else tool.name
    return shlex.join(["python", name, *sys.argv[1:]])


def today() -> str:
    """The date in UTC, as ISO 8601."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def commit() -> str:
    """The short name of the checked-out commit, with "+" if tracked files differ from it.

    Files of docs/measured may differ: one run writes several.
    """
    rest = ["--untracked-files=no", "--", ".", ":(exclude)docs/measured"]
    return _git("rev-parse", "--short=8", "HEAD") + "+" * bool(_git("status", "--short", *rest))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write(
    name: str,
    title: str,
    what: str,
    body: Sequence[str],
    with_versions: str,
    *,
    command: str | None = None,
) -> Path:
    """Write docs/measured/NAME.md, from the command that runs now.

    Args:
        body: lines: a table, or several with a line above each.
        with_versions: see `versions`; add the machine where seconds are measured.
        command: instead of the one that runs now, of which the file is a part, or which names
            folders of this machine.
    """
    head = Head(title, what, command or this_command(), today(), commit(), with_versions)
    path = MEASURED / f"{name}.md"
    path.write_text(f"{head.text()}\n" + "\n".join(body).strip() + "\n", encoding="utf-8")
    return path
