"""Patch files: which names of a framework are replaced, by what, and which signatures they have.

One file per host: `patches/<host>.yaml`. A file names code and contains none: replacements are
names below `megapack.hosts`, and nothing else is imported because of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from megapack.config.load import load_config
from megapack.errors import ConfigError

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"{_DOTTED}:{_DOTTED}")
_REPLACEMENT = re.compile(rf"megapack\.hosts\.{_DOTTED}:[A-Za-z_]\w*")
_HOST = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One name of the host and its replacement."""

    target: str
    """`module:name` or `module:Class.name` of the host."""
    signatures: tuple[str, ...] = ()
    """Accepted signatures of the target: `(lengths, *, budget=None)`. Names, kinds and defaults are
    compared, annotations are not; the default `...` matches any default."""
    argument: str | None = None
    """In place of signatures, a parameter of the target, such as the host's config: the target
    stays, and the replacement is called with this argument before each of its calls. What it
    returns, if anything, takes the argument's place."""
    replacement: str
    """`module:name` below megapack.hosts."""
    why: str
    """What the user gains, one line."""
    rebinds: Literal["host", "everywhere"] = "host"
    """Copies that are rebound, too: those in the host's own modules, if the target's module defines
    the name; or every loaded module's global, for a name that a library's package re-exports and
    other frameworks import. The module that defines the name keeps its own, and so does
    megapack."""

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ConfigError(f"target={self.target!r}; write module:name or module:Class.name")
        if not _REPLACEMENT.fullmatch(self.replacement):
            raise ConfigError(
                f"replacement={self.replacement!r}; patches load code of megapack.hosts only: "
                "write megapack.hosts.<host>:<name>"
            )
        if bool(self.signatures) == (self.argument is not None):
            raise ConfigError(
                f"{self.target} has {len(self.signatures)} signatures and argument="
                f"{self.argument}; write at least one signature, or the argument to read"
            )

    @property
    def expected(self) -> str:
        """What the target must look like."""
        if self.argument is not None:
            return f"a parameter {self.argument}"
        return " or ".join(self.signatures)

    @property
    def module(self) -> str:
        """The module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The target inside its module, `name` or `Class.name`."""
        return self.target.partition(":")[2]

    @property
    def dotted(self) -> str:
        """The target as people write it."""
        return self.target.replace(":", ".")


@dataclass(frozen=True, kw_only=True)
class Optional:
    """Patches that a user must name, because they change more than how samples are packed."""

    host: str
    """The name that users apply them by."""
    why: str
    """What they change, one line."""


@dataclass(frozen=True, kw_only=True)
class PatchFile:
    """The patches of one host."""

    host: str
    """The name that users apply it by."""
    seen: str
    """Versions or commits that it was written for."""
    patches: tuple[Replacement, ...]
    distribution: str | None = None
    """The installed package that `since` is a version of."""
    since: str | None = None
    """First version that the file is for; None: the signatures alone decide."""
    brings: tuple[str, ...] = ()
    """Shipped hosts whose patches are applied with these, because both are proven together."""
    optional: tuple[Optional, ...] = ()
    """Patches for this host that stay off."""
    diff: str = ""
    """Lines to add to the user's script, as a unified diff, if replacing names is not enough."""

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ConfigError(f"host={self.host!r}; write a word like slime or megatron_lm")
        if not self.patches:
            raise ConfigError(f"{self.host} has no patches; write at least one")
        for host in (*self.brings, *(each.host for each in self.optional)):
            refuse_unknown(host)
        if self.distribution is None and self.since is not None:
            raise ConfigError("since is a version of a distribution; set distribution")

    @property
    def version(self) -> str | None:
        """The host's installed version; None if it is not installed or has no package."""
        if self.distribution is None:
            return None
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    @property
    def problem(self) -> str:
        """Why the file is not for the host's installed version; empty if it may be."""
        if self.is_for(self.version):
            return ""
        return (
            f"{self.distribution} {self.version} is installed and the patches are for {self.since} "
            "and newer; install such a version, or an older megapack"
        )

    def is_for(self, version: str | None) -> bool:
        """Whether the file is for a version of the host; None: it is not known, so it may be."""
        if version is None or self.since is None:
            return True
        return _release(version) >= _release(self.since)


def read_patches(host: str) -> PatchFile:
    """The patch file of a host, or of a path that ends in `.yaml`, whatever is installed.

    Raises:
        ConfigError: no such host, or an invalid file.
    """
    if host.endswith(".yaml"):
        return _load(Path(host))
    refuse_unknown(host)
    return _load(_folder() / f"{host}.yaml")


def patch_set(names: Iterable[str], *, any_version: bool = False) -> tuple[PatchFile, ...]:
    """The patch files of hosts and of what these bring, each once, in this order.

    Args:
        names: hosts, or paths that end in `.yaml`. A name after a minus is left out:
            `["slime", "-megatron_core"]` is slime's planner without the step.
        any_version: files for newer versions than the installed one, too.

    Raises:
        ConfigError: as `read_patches`; a file for newer versions than the installed one, a minus
            before what no other name brings, or names that leave everything out.
    """
    names = list(names)
    left_out = {name[1:] for name in names if name.startswith("-")}
    files: dict[str, PatchFile] = {}
    wanted = [name for name in names if not name.startswith("-")]
    while wanted:
        file = read_patches(wanted.pop(0))
        if file.host not in files:
            files[file.host] = file
            wanted[:0] = file.brings
    for name in sorted(left_out - files.keys()):
        refuse_unknown(name)
        brought = ", ".join(files) or "nothing"
        raise ConfigError(f"-{name}: nothing to leave out; the other names bring {brought}")
    if left_out and left_out == files.keys():
        raise ConfigError(f"{', '.join(names)}: all patches are left out; name one that stays")
    kept = tuple(file for host, file in files.items() if host not in left_out)
    for file in kept:
        if file.problem and not any_version:
            raise ConfigError(file.problem)
    return kept


def names_in(value: str, *, where: str = "", unless: str = "") -> list[str]:
    """The names in a text, with commas between them.

    Raises:
        ConfigError: there is none; the message is that between `where` and `unless`.
    """
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{where}{value!r} names no host; set one, such as slime{unless}")
    return names


def refuse_unknown(host: str) -> None:
    """Refuse a name that is no shipped host; a path is none.

    Raises:
        ConfigError: with the nearest of the shipped hosts, if one is near, and all of them.
    """
    hosts = shipped_hosts()
    if host not in hosts:
        near = difflib.get_close_matches(host.lower(), hosts, n=1)
        meant = f"did you mean {near[0]}? There" if near else "there"
        raise ConfigError(f"no patches for {host!r:.60}; {meant} are {', '.join(hosts)}")


def shipped_hosts() -> tuple[str, ...]:
    """Names of the hosts that megapack has patches for."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def shipped_files() -> tuple[PatchFile, ...]:
    """Every patch file of megapack, whatever is installed."""
    return tuple(map(read_patches, shipped_hosts()))


def _folder() -> Path:
    """patches/, which is inside the package in a wheel and beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def _load(path: Path) -> PatchFile:
    return load_config(path, [], PatchFile)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.9.1.dev3+cu13 is (0, 9, 1)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else (0,)
