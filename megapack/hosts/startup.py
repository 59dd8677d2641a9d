"""`megapack-startup.pth` calls `start` in every Python process that has one of two variables set.

It patches processes that a framework starts itself, such as Ray's actors:

    MEGAPACK_PATCH=slime

and `megapack run --cpu` sets the other for processes that a recipe starts, such as Megatron-LM's
checkpoint writers, which import the recipe again:

    MEGAPACK_CPU=1
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

VARIABLE = "MEGAPACK_PATCH"
CPU_VARIABLE = "MEGAPACK_CPU"


def start() -> None:
    """Apply the patches that a variable names, and run on the CPU if the other asks for it.

    A value that cannot be applied, such as an unknown name, ends the process where it imports a
    host: one that imports none, such as pip, goes on.

    Imports no module of the host: if a patch does not fit, the host's own import raises the error.
    Python started with -I or -E, or with the rights of another user (setuid, setgid), ignores the
    variables.
    """
    if sys.flags.ignore_environment or _has_more_rights():
        return
    if os.environ.get(VARIABLE):
        _patch()
    if os.environ.get(CPU_VARIABLE):
        _enable_cpu_after_torch()


def _patch() -> None:
    try:
        # Imported after the check: a process with raised rights must import nothing of patching.
        from megapack.hosts.patching.registry import apply

        log_to_stderr()
        apply(*asked_hosts(os.environ[VARIABLE]))
    except Exception as error:
        line = f"megapack: {VARIABLE}: {' '.join(str(error).split())}\n"
        try:
            _end_at_any_host(line)
        except Exception:  # a broken installation
            _end(line)


def _end_at_any_host(line: str) -> None:
    """End right after the import of a package of any host, such as slime or megatron.core."""
    from wrapt import register_post_import_hook

    from megapack.hosts.patching.files import shipped_files

    chains = [entry.module.split(".") for file in shipped_files() for entry in file.patches]
    for name in {".".join(parts[:end]) for parts in chains for end in (1, 2)}:
        register_post_import_hook(lambda module: _end(line), name)


def _end(line: str) -> None:
    """End the process. Python, or the importing code, may catch an error and go on unpatched."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, line)):
        with contextlib.suppress(Exception):  # it may be closed, or its disk full
            stream.write(text)
            stream.flush()
    os._exit(2)


def asked_hosts(value: str) -> list[str]:
    """The hosts that a value of the variable names: shipped ones, never a path; `-name` leaves out.

    Only the command line can name patch files; someone else may have set the variable.

    Raises:
        ConfigError: megapack ships no patches for one of the names, or a value names none.
    """
    from megapack.hosts.patching.files import names_in, refuse_unknown

    names = names_in(value, unless=f", or unset {VARIABLE}") if value else []
    for name in names:
        refuse_unknown(name.removeprefix("-"))
    return names


def log_to_stderr() -> None:
    """Show one line per patch on the first rank, and warnings on all."""
    log = logging.getLogger("megapack.hosts.patching.target")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megapack: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
        log.propagate = False


def _enable_cpu_after_torch() -> None:
    """`cpu.enable` right after the import of torch: most processes do without."""
    from wrapt import register_post_import_hook

    def enable(torch: object) -> None:
        from megapack import cpu

        cpu.enable()

    register_post_import_hook(enable, "torch")


def _has_more_rights() -> bool:
    """Whether the process runs with the rights of another user than the one that started it."""
    return os.getuid() != os.geteuid() or os.getgid() != os.getegid()
