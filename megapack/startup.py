"""What `megapack-startup.pth` runs at the start of a Python that has MEGAPACK_PATCH set.

For processes that a framework starts itself, Ray's actors among them:

    MEGAPACK_PATCH=slime,megatron_lm
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

VARIABLE = "MEGAPACK_PATCH"


def start() -> None:
    """Apply the patches that the variable names; an unknown name ends the process.

    Nothing of the host is imported here: what does not fit is raised by the host's own import.
    Python started with -I or -E, or with the rights of another user (setuid, setgid), ignores the
    variable.
    """
    if sys.flags.ignore_environment or _has_more_rights():
        return
    try:
        # Not above: a process with more rights imports none of it.
        from megapack.patching.applied import apply

        log_to_stderr()
        for host in asked_hosts(os.environ[VARIABLE]):
            apply(host)
    except Exception as error:
        # site prints and forgets what a start-up file raises: the process would run unpatched.
        with contextlib.suppress(Exception):  # there may be no stderr, or a full one
            sys.stderr.write(f"megapack: {VARIABLE}: {' '.join(str(error).split())}\n")
            sys.stderr.flush()
        os._exit(2)


def asked_hosts(value: str) -> list[str]:
    """The hosts that a value of the variable names: shipped ones, never a path.

    Who sets a variable may not be who wrote the command line, which alone can name files.

    Raises:
        ConfigError: there are no shipped patches of one of these names.
    """
    from megapack.errors import ConfigError
    from megapack.patching.files import shipped_hosts

    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in shipped_hosts():
            known = ", ".join(shipped_hosts())
            raise ConfigError(f"no patches for {name!r:.60}; there are {known}")
    return names


def log_to_stderr() -> None:
    """Show one line per patch on the first rank, and warnings on all."""
    log = logging.getLogger("megapack.patching.target")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megapack: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
        log.propagate = False


def _has_more_rights() -> bool:
    """Whether the process runs with the rights of another user than the one that started it."""
    return os.getuid() != os.geteuid() or os.getgid() != os.getegid()
