"""Python processes that this one starts: they import what it imports, and nothing else."""

from __future__ import annotations

import os
import sys


def python_command(code: str, *arguments: str) -> list[str]:
    """The command that runs `code` in another Python process, with this one's `sys.path`.

    Python would put the working directory first, which may hold a `pickle.py` of anyone. What this
    process ignores (variables, the user's packages), the other one ignores too.
    """
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-S": sys.flags.no_site,
    }
    paths = [path or os.getcwd() for path in sys.path]
    return [
        *(sys.executable, "-P", *(flag for flag, is_set in flags.items() if is_set)),
        *("-c", f"import sys; sys.path[:] = {paths!r}; {code}", *arguments),
    ]
