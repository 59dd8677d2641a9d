"""What `megapack-startup.pth` runs at the start of a Python that has MEGAPACK_PATCH set.

For processes that a framework starts itself, Ray's actors among them:

    MEGAPACK_PATCH=slime,megatron_lm
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "MEGAPACK_PATCH"


def start() -> None:
    """Apply the patches that the variable names; a name that is none ends the process.

    Nothing of the host is imported here: what does not fit is raised by the host's own import.
    Python started with -I or -E, or for another user (setuid), ignores the variable.
    """
    if sys.flags.ignore_environment or _is_setuid():
        return
    try:
        log_to_stderr()
        _apply(os.environ[VARIABLE].split(","))
    except Exception as error:
        # site prints and forgets what a start-up file raises: the process would run unpatched.
        print(f"megapack: {VARIABLE}: {error}", file=sys.stderr, flush=True)
        os._exit(2)


def _apply(names: list[str]) -> None:
    # Not above: a process of another user imports none of it.
    from megapack.errors import ConfigError
    from megapack.patch_files import shipped_hosts
    from megapack.patching import apply

    for name in filter(None, map(str.strip, names)):
        if name not in shipped_hosts():
            known = ", ".join(shipped_hosts())
            raise ConfigError(f"no patches for {name!r:.60}; there are {known}")
        apply(name)


def log_to_stderr() -> None:
    """Show one line per patch on the first rank, and warnings on all."""
    log = logging.getLogger("megapack.patch_target")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megapack: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
        log.propagate = False


def _is_setuid() -> bool:
    return os.getuid() != os.geteuid() or os.getgid() != os.getegid()
