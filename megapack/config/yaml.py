"""Parse plain YAML to values with their lines, and dump plain values.

A config is one document of mappings, lists and scalars. Scalars follow YAML 1.2: `1e-5` is a
number, `yes`, `on` and `2024-01-01` are strings, and `010` is a string, not an octal number.

These are refused: tags (they can create Python objects), aliases (nested ones grow exponentially)
and duplicate keys (one value would be lost).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

from megapack.errors import ConfigError, one_line

# A config nests 4 deep (mapping, section, list, scalar). 16 was chosen by hand; it keeps hostile
# files from exhausting Python's stack.
_MAX_DEPTH = 16
# Compiled code uses settings as int64.
_MAX_WHOLE = 2**63
# Scalars after YAML 1.2's core schema, by tag: no octal numbers, but underscores (1_000).
_CORE = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+",
    "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf)|\.(nan|NaN)",
}


@dataclasses.dataclass
class Node:
    """A parsed value and its position."""

    value: Any
    """A scalar, list[Node] or dict[str, Node]."""
    where: str
    """`source:line`, or `source` alone for an override."""


def parse(text: str, source: str, lines: bool = True) -> Node:
    """Parse one YAML document.

    Args:
        text: the document.
        source: name of the file or override, for errors.
        lines: whether positions have a line number.

    Raises:
        ConfigError: the text is not YAML, or has tags, aliases, duplicate keys or deep nesting.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return Node(None, source) if node is None else _tree(loader, node, source, lines)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if lines and error.problem_mark else ""
        begins = f"{error.context} " if (error.context or "").startswith("expected") else ""
        hint = "; quote a text that begins with *" if "alias" in (error.context or "") else ""
        raise ConfigError(f"{source}{line}: {begins}{error.problem}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = one_line(error)
        raise ConfigError(f"{source}: not plain YAML ({reason[:120]}); check the text") from None


def dump(values: dict[str, Any]) -> str:
    """Plain values as YAML; `parse` reads it back to equal values."""
    # PyYAML writes ASCII with escapes by default. Raw Unicode line breaks inside quotes would be
    # folded into spaces.
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False)


def _tree(loader: _Loader, node: yaml.Node, source: str, lines: bool) -> Node:
    where = f"{source}:{node.start_mark.line + 1}" if lines else source
    if isinstance(node, yaml.SequenceNode):
        return Node([_tree(loader, item, source, lines) for item in node.value], where)
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if type(value) is int and abs(value) >= _MAX_WHOLE:
            raise ConfigError(f"{where}: a whole number of 2^63 or more; write a smaller one")
        return Node(value, where)
    mapping: dict[str, Node] = {}
    for key_node, value_node in node.value:
        key_where = f"{source}:{key_node.start_mark.line + 1}" if lines else source
        key = _tree(loader, key_node, source, lines).value
        if not isinstance(key, str) or not key.isidentifier():
            raise ConfigError(f"{key_where}: keys are words, got {key_node.value!r:.60}")
        if key in mapping:
            raise ConfigError(f"{key_where}: key {key} appears twice; keep one of them")
        mapping[key] = Node(_tree(loader, value_node, source, lines).value, key_where)
    return Node(mapping, where)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars, without aliases, tags and deep nesting."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are refused; write the value out, or quote it"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags are refused, got {event.tag}; write the value without it"
        elif self._depth >= _MAX_DEPTH:
            problem = f"nested deeper than {_MAX_DEPTH}; write it with fewer levels"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or `_Loader` would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _CORE.items():
    _regexp = re.compile(f"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _regexp, None)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _regexp, None)
