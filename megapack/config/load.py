"""Load YAML into frozen dataclasses, strictly, and dump it again.

A config goes from a file or text through `yaml.parse` (safe YAML without aliases and tags) to plain
values with their lines, then through the overrides `a.b=c` to typed dataclasses. `dump_yaml` is the
inverse: its output loads into an equal object.

>>> import dataclasses
>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Optim:
...     lr: float = 1e-4
>>> parse_config("lr: 1e-5", ["lr=3e-5"], Optim)
Optim(lr=3e-05)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from megapack.base.files import read_whole, text_of
from megapack.config.typed import Converter, shown
from megapack.config.yaml import Node, dump, parse
from megapack.errors import ConfigError, reason_of

T = TypeVar("T")

# The longest shipped config has 1.1 KB; a file above 1 MiB was given by mistake.
_MAX_BYTES = 1 << 20


def load_config(path: str | Path, overrides: Sequence[str], cls: type[T]) -> T:
    """Read a YAML file into the frozen dataclass `cls`.

    Args:
        path: the YAML file.
        overrides: `a.b=c` each. `c` is parsed as YAML; the last override of a key wins.
        cls: a keyword-only dataclass. Its fields are typed with bool, int, float, str, None,
            Literal, tuple[T, ...], unions of these, and other such dataclasses.

    Raises:
        ConfigError: the file cannot be read, is not plain YAML, or has an unknown key, a duplicate
            key or a value of the wrong type. The message gives the file, the line and the dotted
            key.
    """
    try:
        data = read_whole(path, _MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({reason_of(error)}); give the path of a YAML file"
        ) from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: longer than {_MAX_BYTES} bytes; give the path of a config")
    try:
        text = text_of(data)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse_config(text, overrides, cls, source=str(path))


def parse_config(text: str, overrides: Sequence[str], cls: type[T], source: str = "<config>") -> T:
    """`load_config` for YAML that is already in memory; `source` names it in errors."""
    root = parse(text, source)
    if root.value is None:
        root = Node({}, root.where)
    if not isinstance(root.value, dict):
        raise ConfigError(
            f"{root.where}: a config is `key: value` lines, got {shown(root.value)}; give those"
        )
    for override in overrides:
        _apply(root, override)
    config: T = Converter(cls, source).dataclass(root, cls, "")
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested plain values: dicts, lists, numbers, booleans, strings, None."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def dump_yaml(config: Any) -> str:
    """A config as YAML with every key; `parse_config(dump_yaml(c), [], type(c)) == c`."""
    return dump(to_dict(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _apply(root: Node, override: str) -> None:
    """Set the value of one override `a.b=c` in the tree under `root`."""
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    where = f"override {shown(override)}"
    if not equals or not all(name.isidentifier() for name in keys):
        raise ConfigError(f"{where} is not of the form section.key=value; write it in that form")
    section = root
    for depth, name in enumerate(keys[:-1], start=1):
        section = section.value.setdefault(name, Node({}, where))
        if not isinstance(section.value, dict):
            found = f"{'.'.join(keys[:depth])} is {shown(section.value)}"
            raise ConfigError(f"{where}: {found}, not a section")
    section.value[keys[-1]] = parse(text, where, lines=False)
