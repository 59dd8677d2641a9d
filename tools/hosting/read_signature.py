"""What `inspect.signature` would show of a host's name, read from its source.

    signatures(Sources([tree]), "verl.utils.seqlen_balancing", "rearrange_micro_batches")

A class has the signature of its constructor, a dataclass that of its fields. Decorators are taken
to keep the signature, like those that use `functools.wraps`.
"""

from __future__ import annotations

import ast
from inspect import Parameter, Signature
from typing import Any

from megapack.hosts.patching.target import parameters_of
from tools.hosting.read_source import Binding, NotRead, Outside, Sources, bound_in

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Their objects in a class are not callable.
_DESCRIPTORS = ("classmethod", "property", "cached_property", "functools.cached_property")
# Bases without a constructor of their own.
_PLAIN = ("object", "ABC", "abc.ABC", "Generic", "typing.Generic", "Protocol", "typing.Protocol")


class OtherText:
    """A default that is not a literal: it is shown as it is written, and equal to no literal."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signatures(sources: Sources, module: str, name: str) -> list[Signature]:
    """The signatures of `name` or `Class.name` in a module, one per branch that binds it.

    Raises:
        NotRead: absent, not callable, or its source does not tell the signature.
    """
    if not sources.has(module):
        raise NotRead(f"no module {module}")
    owner, _, method = name.rpartition(".")
    reader = _Reader(sources)
    if not owner:
        return reader.read_any(sources.bindings(module, name))
    found = [b for b in sources.bindings(module, owner) if isinstance(b.node, ast.ClassDef)]
    methods = [Binding(b.module, node) for b in found for node in bound_in(b.node.body, method)]
    if not methods:
        raise NotRead(f"no {method} in class {owner}" if found else f"no class {owner}")
    return reader.read_any(methods)


class _Reader:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def read_any(self, bindings: list[Binding]) -> list[Signature]:
        """Those of the branches that can be read: `except ImportError: f = None` is left out."""
        found = []
        problem = NotRead("nothing")
        for binding in bindings:
            try:
                found.append(self.read(binding))
            except NotRead as error:
                problem = error
        if not found:
            raise problem
        return found

    def read(self, binding: Binding) -> Signature:
        """The signature of one binding."""
        module, node = binding
        if isinstance(node, ast.ClassDef):
            return self._constructor(binding)
        if isinstance(node, Function):
            for decorator in map(ast.unparse, node.decorator_list):
                if decorator in _DESCRIPTORS:
                    raise NotRead(f"an object of type {decorator.rpartition('.')[2]}")
            return Signature(self._parameters(module, node))
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            raise NotRead(f"an object of type {type(value.value).__name__}")
        raise NotRead(f"`{ast.unparse(node):.80}`, whose signature is not in the source")

    def _parameters(self, module: str, function: Function) -> list[Parameter]:
        return parameters_of(function.args, lambda default: self._value(module, default))

    def _value(self, module: str, default: ast.expr) -> Any:
        try:
            return ast.literal_eval(default)
        except ValueError:
            pass
        if isinstance(default, ast.Name):
            # A constant of the module: what is shown is its value.
            try:
                nodes = [node for _, node in self._sources.bindings(module, default.id)]
                (value,) = [ast.literal_eval(node.value) for node in nodes]  # type: ignore[attr-defined]
                return value
            except (NotRead, ValueError, AttributeError):
                pass
        return OtherText(ast.unparse(default))

    def _constructor(self, binding: Binding) -> Signature:
        """Of the first class in the order of bases that has one."""
        classes = self._with_bases(binding)
        for position, (module, node) in enumerate(classes):
            if node is None:
                raise Outside(f"a constructor of {module}, which is not here")
            assert isinstance(node, ast.ClassDef)
            for name in ("__new__", "__init__"):
                for function in bound_in(node.body, name):
                    if isinstance(function, Function):
                        return Signature(self._parameters(module, function)[1:])
            if _is_dataclass(node):
                return self._of_fields(classes[position:])
        return Signature()

    def _with_bases(self, binding: Binding) -> list[Any]:
        """A class and its bases, nearest first: bindings, or (name, None) for what is not here."""
        module, node = binding
        assert isinstance(node, ast.ClassDef)
        found: list[Any] = [binding]
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if name in _PLAIN:
                continue
            try:
                bases = self._sources.bindings(module, name)
            except NotRead:
                bases = []
            classes = [b for b in bases if isinstance(b.node, ast.ClassDef)]
            found += self._with_bases(classes[0]) if classes else [(name, None)]
        return found

    def _of_fields(self, classes: list[Any]) -> Signature:
        fields: dict[str, Parameter] = {}
        for module, node in reversed(classes):
            if node is None:
                raise Outside(f"fields of {module}, which is not here")
            if _is_dataclass(node):
                for field in self._fields(module, node):
                    fields[field.name] = field
        # As dataclasses do: keyword-only fields last.
        return Signature(sorted(fields.values(), key=lambda p: p.kind is p.KEYWORD_ONLY))

    def _fields(self, module: str, node: ast.ClassDef) -> list[Parameter]:
        keywords_only = _options(node.decorator_list).get("kw_only") is True
        found = []
        for line in node.body:
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
                continue
            kind = ast.unparse(line.annotation)
            if kind.endswith("KW_ONLY"):
                keywords_only = True
            elif "ClassVar" not in kind:
                found += self._field(module, line, keywords_only)
        return found

    def _field(self, module: str, line: ast.AnnAssign, keyword_only: bool) -> list[Parameter]:
        assert isinstance(line.target, ast.Name)
        default: Any = Parameter.empty
        if line.value is not None and _is_call_of(line.value, "field"):
            given = {k.arg: k.value for k in line.value.keywords}  # type: ignore[attr-defined]
            options = _options([line.value])
            if options.get("init") is False:
                return []
            keyword_only = bool(options.get("kw_only", keyword_only))
            if "default" in given:
                default = self._value(module, given["default"])
            elif "default_factory" in given:
                default = OtherText("<factory>")
        elif line.value is not None:
            default = self._value(module, line.value)
        kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
        return [Parameter(line.target.id, kind, default=default)]


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    is_marked = any(name.rpartition(".")[2] == "dataclass" for name in names)
    return is_marked and _options(node.decorator_list).get("init") is not False


def _is_call_of(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name


def _options(calls: list[ast.expr]) -> dict[str, Any]:
    """Keywords with literal values of decorators or calls."""
    keywords = [k for call in calls if isinstance(call, ast.Call) for k in call.keywords]
    return {
        keyword.arg: keyword.value.value
        for keyword in keywords
        if keyword.arg and isinstance(keyword.value, ast.Constant)
    }
