"""Options of a host's module; with the defaults it passes the host's own tests."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any, Generic, TypeVar

from megapack.errors import ConfigError

T = TypeVar("T")

SHARE_PREFIXES = "MEGAPACK_SHARE_PREFIXES"


def shares_prefixes() -> bool:
    """Whether the environment asks for shared prefixes in the rows of hosts.

    Raises:
        ConfigError: MEGAPACK_SHARE_PREFIXES is neither 1 nor 0.
    """
    value = os.environ.get(SHARE_PREFIXES, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SHARE_PREFIXES}={value!r}; set 1 (on) or 0 (off)")
    return value == "1"


class HostOptions(Generic[T]):
    """The options in force, a frozen dataclass.

    options = HostOptions(SlimeOptions())
    configure = options.configure       # the module's public name
    options.current.count_rule          # what its functions read
    """

    def __init__(self, defaults: T) -> None:
        self._defaults = defaults
        self.current = defaults

    def configure(self, **changes: Any) -> T:
        """Change options for the rest of the process; without arguments reset them all.

        Every rank must set the same options.

        Returns:
            The options now in force.

        Raises:
            ConfigError: an unknown option, with the nearest name, or a value that is refused.
        """
        if not changes:
            self.current = self._defaults
            return self.current
        names = [field.name for field in dataclasses.fields(self.current)]  # type: ignore[arg-type]
        for name in changes:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1) or [", ".join(names)]
                raise ConfigError(f"this host has no option {name!r}; did you mean {near[0]}?")
        self.current = dataclasses.replace(self.current, **changes)  # type: ignore[type-var]
        return self.current
