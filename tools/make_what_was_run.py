"""Write docs/measured/README.md: what was run, from the heads of the files beside it.

    python tools/make_what_was_run.py [--check]

With `--check` nothing is written; the exit code is 1 if the page is not that of the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.pages.marks import table
from tools.pages.measured import MEASURED, Head

PAGE = MEASURED / "README.md"
_TOP = """# What was run

Every number that a page quotes stands in a file of this folder, with the command that made it. The
tool writes the file, so a newer run replaces the older one. `+` after a commit: the checkout had
changes of its own.

"""


def page() -> str:
    """The page's text."""
    rows = []
    for path in sorted(MEASURED.glob("*.md")):
        if path != PAGE:
            head = Head.read(path)
            command = head.command.replace("|", r"\|")
            rows.append(
                (
                    f"[{head.title}]({path.name})",
                    f"`{command}`",
                    head.date,
                    head.commit,
                    head.with_versions,
                )
            )
    return _TOP + table(["what", "command", "date", "commit", "with"], rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"docs/measured/README.md is old: run python {sys.argv[0]}", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
