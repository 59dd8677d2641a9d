"""Settings of megapack in a host's own config: a `megapack` block, or `--megapack-...` arguments.

    SETTINGS = NativeSettings(_OPTIONS, megatron_core.OPTIONS)
    SETTINGS.take(config.get("megapack"), "actor_rollout_ref.megapack")

Names are those of `configure`; what several modules have, such as `share_prefixes`, is set in each.
A host gives its config to all of its processes, so that all of them have the same settings,
whatever their environments say.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from megapack.config.cost_file import read_cost
from megapack.config.typed import Converter, describe
from megapack.config.yaml import Node, parse
from megapack.errors import ConfigError
from megapack.hosts.shared.options import HostOptions

logger = logging.getLogger(__name__)

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Adds arguments to a parser, as Megatron calls it."""

_PREFIX = "megapack_"


class NativeSettings:
    """The options of one or more modules of hosts, as keys of the host's config."""

    def __init__(self, *options: HostOptions[Any]) -> None:
        self._options = options
        self._shown: dict[str, Any] = {}

    @cached_property
    def types(self) -> dict[str, Any]:
        """Name of each setting -> its type."""
        found: dict[str, Any] = {}
        for options in self._options:
            hints = typing.get_type_hints(type(options.current))
            found |= {
                field.name: hints[field.name] for field in dataclasses.fields(options.current)
            }
        if "cost" in found:
            found["cost"] = str | found["cost"]
        return found

    def take(self, block: Mapping[str, Any] | None, where: str) -> None:
        """Set the options of a block, over the environment and over what `configure` was told.

        Args:
            block: settings by name; None sets nothing. `cost` is a section, or the path of a file
                of `tools/calibrate.py`.
            where: what the user calls the block.

        Raises:
            ConfigError: an unknown key, with the nearest name, or a value that is refused.
        """
        settings = {} if block is None else self._read(block, where)
        try:
            for options in self._options:
                names = {field.name for field in dataclasses.fields(options.current)}
                if own := {name: settings[name] for name in settings if name in names}:
                    options.configure(**own)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if settings != self._shown:
            self._shown = settings
            text = ", ".join(f"{name}={value}" for name, value in settings.items())
            logger.info("settings of %s: %s", where, text)

    def take_arguments(self, args: Any) -> None:
        """`take` the attributes `megapack_...` of a host's arguments that are set."""
        block = {
            name.removeprefix(_PREFIX): value
            for name, value in vars(args).items()
            if name.startswith(_PREFIX) and value is not None
        }
        self.take(block, "arguments of megapack")

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add `--megapack-...` to a host's parser, one for each setting.

        The parser ends the process on a value that is refused, and here on an unknown name, which
        hosts ignore because other parsers of theirs read the same command line.
        """
        group = parser.add_argument_group("megapack")
        flags = {"--megapack-" + name.replace("_", "-"): name for name in self.types}
        for flag, name in flags.items():
            hint = self.types[name]
            alone: dict[str, Any] = {"nargs": "?", "const": True} if hint is bool else {}
            read = partial(self._argument, name)
            group.add_argument(flag, type=read, help=describe(hint), **alone)
        for given in sys.argv[1:]:
            flag = given.partition("=")[0]
            if flag.startswith("--megapack") and flag not in flags:
                near = difflib.get_close_matches(flag, flags, n=1) or [", ".join(flags)]
                parser.error(f"unknown argument {flag}; did you mean {near[0]}?")
        return parser

    def _argument(self, name: str, text: str) -> Any:
        try:
            value = parse(text, name, lines=False).value
            settings = self._read({name: value}, "megapack")
            for options in self._options:
                if hasattr(options.current, name):
                    dataclasses.replace(options.current, **settings)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return settings[name]

    def _read(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The settings of a block, converted."""
        fields = [
            (name, hint, dataclasses.field(default=None)) for name, hint in self.types.items()
        ]
        cls = dataclasses.make_dataclass("megapack", fields, kw_only=True)
        read = Converter(cls, where).dataclass(_node(block, where), cls, "")
        settings = {name: getattr(read, name) for name in block}
        if isinstance(settings.get("cost"), str):
            if settings.get("layout") is None:
                raise ConfigError(f"{where}: cost is used with a layout only; set both")
            settings["cost"] = read_cost(settings["cost"], settings["layout"])
        return settings


def _node(value: Any, where: str) -> Node:
    """Plain values, or containers of OmegaConf, as if they had been parsed."""
    if isinstance(value, Mapping):
        value = {str(key): _node(child, where) for key, child in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = [_node(child, where) for child in value]
    return Node(value, where)
