"""Signatures as text: what a patch expects of a name, and what it finds."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from megapack.errors import ConfigError

_KINDS = inspect.Parameter


def parse_signature(text: str) -> inspect.Signature:
    """`(a, b=None, *, c)` as a signature; defaults are literals, nothing is evaluated.

    Raises:
        ConfigError: it is no such text.
    """
    try:
        (function,) = ast.parse(f"def f{text}: pass").body
        assert isinstance(function, ast.FunctionDef)
        return inspect.Signature(_parameters(function.args))
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(f"{text!r:.80} is no signature; write (a, b=None, *, c)") from None


def signature_of(target: Any) -> inspect.Signature:
    """The signature of a function, or of a class's constructor, without annotations.

    Raises:
        ValueError, TypeError: it has none.
    """
    found = inspect.signature(target)
    parameters = [p.replace(annotation=_KINDS.empty) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def is_like(found: inspect.Signature, expected: inspect.Signature) -> bool:
    """Whether names, kinds and defaults are the same; an expected default `...` is any default."""
    pairs = list(found.parameters.values()), list(expected.parameters.values())
    return len(pairs[0]) == len(pairs[1]) and all(map(_same, *pairs))


def _same(found: inspect.Parameter, expected: inspect.Parameter) -> bool:
    if (found.name, found.kind) != (expected.name, expected.kind):
        return False
    if expected.default is ...:
        return found.default is not _KINDS.empty
    # 1 == True == 1.0: their texts differ.
    return repr(found.default) == repr(expected.default)


def _parameters(args: ast.arguments) -> list[inspect.Parameter]:
    plain: list[tuple[ast.arg, Any]] = [(arg, _KINDS.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, _KINDS.POSITIONAL_OR_KEYWORD) for arg in args.args]
    first_default = len(plain) - len(args.defaults)
    parameters = [
        _parameter(arg, kind, args.defaults[i - first_default] if i >= first_default else None)
        for i, (arg, kind) in enumerate(plain)
    ]
    if args.vararg:
        parameters.append(_parameter(args.vararg, _KINDS.VAR_POSITIONAL, None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(_parameter(arg, _KINDS.KEYWORD_ONLY, default))
    if args.kwarg:
        parameters.append(_parameter(args.kwarg, _KINDS.VAR_KEYWORD, None))
    return parameters


def _parameter(arg: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value = _KINDS.empty if default is None else ast.literal_eval(default)
    return inspect.Parameter(arg.arg, kind, default=value)
