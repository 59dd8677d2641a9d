"""Convert parsed YAML to typed dataclasses. Errors give the line and the dotted key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from megapack.config.yaml import Node
from megapack.errors import ConfigError, brief


@dataclasses.dataclass(frozen=True)
class Converter:
    """Converts nodes to typed values."""

    root: Any
    """The dataclass of the whole config. A misplaced key is searched for in all its sections."""
    source: str
    """Name of the file, for errors."""

    def dataclass(self, node: Node, cls: Any, path: str) -> Any:
        """A mapping as the dataclass `cls`; `path` is its dotted key.

        A class may have a class method `resolve(values, where)`, which returns the values with
        those that follow from them, such as keys that another file gives. `where` has the position
        of each key, for errors.
        """
        names = _keys(cls)
        if not isinstance(node.value, dict):
            raise ConfigError(
                f"{node.where}: {path or 'this'} is a section, got {shown(node.value)}; "
                f"set keys of it ({', '.join(names[:4])}, ...) or leave it out"
            )
        given: dict[str, Node] = node.value
        for key, child in given.items():
            if key not in names:
                meant = self.nearest(path, key, names)
                raise ConfigError(f"{child.where}: unknown key {_join(path, key):.80}; {meant}")
        hints = typing.get_type_hints(cls)
        values = {
            key: self.convert(child, hints[key], _join(path, key)) for key, child in given.items()
        }
        if hasattr(cls, "resolve"):
            values = cls.resolve(values, {key: child.where for key, child in given.items()})
        for name in names:
            if name not in values and _required(cls, name):
                raise ConfigError(f"{node.where}: {_join(path, name)} has no default; set it")
        try:
            return cls(**values)
        except ConfigError as error:
            # Checks in __post_init__ do not know the file.
            raise ConfigError(f"{self.source}: {error}") from None

    def convert(self, node: Node, hint: Any, path: str) -> Any:
        """The node's value as the type `hint`, or ConfigError."""
        value = node.value
        origin = typing.get_origin(hint)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(node, hint, path)
        if origin in (Union, types.UnionType):
            return self.union(node, typing.get_args(hint), path)
        if origin is tuple and isinstance(value, list):
            of_items = typing.get_args(hint)[0]
            return tuple(self.convert(v, of_items, f"{path}[{i}]") for i, v in enumerate(value))
        if origin is Literal:
            # Compare the type too, because 1 == True in Python.
            for choice in typing.get_args(hint):
                if type(value) is type(choice) and value == choice:
                    return value
        elif origin is dict and isinstance(value, dict):
            of_values = typing.get_args(hint)[1]
            return {k: self.convert(v, of_values, _join(path, k)) for k, v in value.items()}
        elif hint is float and type(value) in (int, float):
            return _finite(node, path)
        elif hint in (bool, int, str, type(None)) and type(value) is hint:
            return value
        raise _unexpected(node, (hint,), path)

    def union(self, node: Node, options: tuple[Any, ...], path: str) -> Any:
        """The value as the first type that accepts it: 1 stays an int under `int | float`."""
        for option in options:
            try:
                return self.convert(node, option, path)
            except ConfigError:
                # An error inside the section says more than "expected a section or null".
                if dataclasses.is_dataclass(option) and isinstance(node.value, dict):
                    raise
        raise _unexpected(node, options, path)

    def nearest(self, path: str, key: str, names: list[str]) -> str:
        """A hint for an unknown key: a similar key of this section, or else of any section."""
        # 0.7 was chosen by hand: it finds swapped letters, as in "cuont" for "count" (0.8).
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
        if close:
            return f"did you mean {_join(path, close[0])}?"
        anywhere = {full.rpartition(".")[2]: full for full in _dotted(self.root, "")}
        close = difflib.get_close_matches(key, anywhere, n=1, cutoff=0.7)
        if close:
            return f"did you mean {anywhere[close[0]]}?"
        return f"valid keys are {', '.join(names)}"


def _unexpected(node: Node, options: tuple[Any, ...], path: str) -> ConfigError:
    expected = " or ".join(describe(option) for option in options)
    words = [word for option in options for word in _words(option)]
    close = difflib.get_close_matches(str(node.value), words, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{node.where}: {path} is {shown(node.value)}, expected {expected}{meant}")


def _finite(node: Node, path: str) -> float:
    number = float(node.value)
    if not math.isfinite(number):
        raise ConfigError(f"{node.where}: {path} is {shown(node.value)}, expected a finite number")
    return number


def _dotted(cls: Any, path: str) -> Iterator[str]:
    """Every dotted key of a config, for example `plan.micro_batch_size`."""
    hints = typing.get_type_hints(cls)
    for name in _keys(cls):
        yield _join(path, name)
        if dataclasses.is_dataclass(hints[name]):
            yield from _dotted(hints[name], _join(path, name))


def _keys(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _required(cls: Any, name: str) -> bool:
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    return field.default is field.default_factory is dataclasses.MISSING


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _words(hint: Any) -> list[str]:
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return [str(choice) for choice in choices]


def describe(hint: Any) -> str:
    """A type as a user writes it in YAML.

    >>> describe(int | None)
    'an integer or null'
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(_words(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {describe(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return f"a mapping of names to {describe(typing.get_args(hint)[1])}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return "null" if hint is type(None) else names.get(hint, "a section")


def shown(value: Any) -> str:
    """A value as YAML writes it, shortened for a one-line message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return brief(value)
