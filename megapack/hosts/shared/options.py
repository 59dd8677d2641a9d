"""Options of a host's module; with the defaults it passes the host's own tests."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megapack.cost.model import CostModel
from megapack.errors import ConfigError
from megapack.layout import Layout

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


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """What most hosts' modules have; a host's page says what its own counts and order are."""

    layout: Layout | None = None
    """The job's layout: rows are planned and ordered for its pipeline, alignment counts against the
    budget, and M is any count that Megatron runs. None: the host's own packing."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None: as in
    `build_dp_schedule`."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """Samples with common beginnings are packed into one row, in which `megatron_core` lets them
    share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost is used with a layout only; set both")

    def refuse_other_stages(self, pp: int, vpp: int, where: str) -> None:
        """Raise ConfigError if a model's virtual stages are not those of the layout, by which its
        numbers of micro-batches are planned.

        Args:
            where: the block that has the layout.
        """
        layout = self.layout or Layout()
        if vpp != layout.vpp or (vpp > 1 and pp != layout.pp):
            raise ConfigError(
                f"the model has pp={pp} and vpp={vpp}, {where}.layout pp={layout.pp} and "
                f"vpp={layout.vpp}; set it to the model's"
            )


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
