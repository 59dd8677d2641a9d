"""One name of a host: its signature is verified against text, and it is replaced and put back."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import inspect
import itertools
import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from megapack.errors import ConfigError, PatchError
from megapack.patching.files import PatchFile, Replacement

_LOG = logging.getLogger(__name__)

State = Literal["applied", "waiting", "lost"]

_KINDS = inspect.Parameter


@dataclass(frozen=True, kw_only=True)
class Status:
    """One replaced name."""

    host: str
    target: str
    """Dotted path of the name."""
    replacement: str
    state: State
    """"waiting" for its module's import; "lost": something else was put in its place since."""
    stale: tuple[str, ...]
    """Names outside the host that still hold the original: imported before the patch."""


class Patch:
    """One replacement of a patch file in this process."""

    def __init__(self, file: PatchFile, entry: Replacement) -> None:
        self.file, self.entry = file, entry
        self._original: Any = None
        self._replacement: Any = None
        parts = entry.module.split(".")
        self.way = [".".join(parts[: end + 1]) for end in range(len(parts))]
        """The packages on the way to the target's module, and it: a, a.b, a.b.c."""

    @property
    def done(self) -> bool:
        """Whether the name was replaced."""
        return self._replacement is not None

    @property
    def is_imported(self) -> bool:
        """Whether the target's module is there."""
        return self.entry.module in sys.modules

    def verify(self) -> None:
        """Refuse a module that is gone, and a name that is, or that has another signature.

        As far as can be seen by what is imported; imports nothing of the host.
        """
        if self.done:
            return
        if self.is_imported:
            self._verify_name()
            self.resolve()
            return
        # Its import would never come, and the patch wait for ever, in silence.
        for package, below in itertools.pairwise(self.way):
            path = getattr(sys.modules.get(package), "__path__", None)
            if path is None or below in sys.modules:
                continue
            if importlib.machinery.PathFinder.find_spec(below, path) is None:
                raise self._moved(f"expected a module {below}, found none")

    def _verify_name(self) -> None:
        expected = " or ".join(self.entry.signatures)
        try:
            owner, attribute = self._place()
            target = vars(owner)[attribute]
        except KeyError:
            raise self._moved(f"expected {expected}, found no such name") from None
        if not callable(target):
            raise self._moved(
                f"expected {expected}, found an object of type {type(target).__name__}"
            )
        found = signature_of(target)
        if not any(is_like(found, parse_signature(text)) for text in self.entry.signatures):
            raise self._moved(f"expected {expected}, found {found}")

    def _moved(self, what: str) -> PatchError:
        host, here = self.file.host, self.file.version or "unknown"
        return PatchError(
            f"{self.entry.dotted}: {what}; the patches for {host} are for {self.file.seen} and "
            f"the version here is {here}: install such a {host}, or run without the patch"
        )

    def resolve(self) -> Any:
        """Import what takes the name's place."""
        module, _, name = self.entry.replacement.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{module}.{name} is missing ({error})") from None
        if getattr(found, "__module__", None) != module:
            raise PatchError(
                f"{module}.{name} was not written in {module}; name a function or class that was"
            )
        return found

    def put(self) -> None:
        """Replace the name, and its copies in the host's own modules. Once; then nothing."""
        if self.done:
            return
        owner, attribute = self._place()
        self._original, replacement = vars(owner)[attribute], self.resolve()
        setattr(owner, attribute, replacement)
        self._replacement = replacement
        _LOG.info(
            "%s: %s is now %s (%s)",
            self.file.host,
            self.entry.dotted,
            self.entry.replacement.replace(":", "."),
            self.entry.why,
        )
        self._rebind(self._original, replacement)
        for name in self._stale():
            _LOG.warning(
                "%s holds the %s of before the patch; apply the patch before that import",
                name,
                self.entry.dotted,
            )

    def take_back(self) -> None:
        """Put the original back, also in the host's modules that imported the replacement."""
        owner, attribute = self._place()
        if vars(owner).get(attribute) is self._replacement:
            setattr(owner, attribute, self._original)
            _LOG.info("%s: %s is the host's own again", self.file.host, self.entry.dotted)
        else:
            _LOG.warning("%s was replaced since and is left alone", self.entry.dotted)
        self._rebind(self._replacement, self._original)

    def status(self) -> Status:
        """What became of it."""
        state: State = "waiting"
        if self.done:
            owner, attribute = self._place()
            state = "applied" if vars(owner).get(attribute) is self._replacement else "lost"
        return Status(
            host=self.file.host,
            target=self.entry.dotted,
            replacement=self.entry.replacement.replace(":", "."),
            state=state,
            stale=self._stale(),
        )

    def _place(self) -> tuple[Any, str]:
        """The loaded module or class that holds the name, and the name there."""
        owner: Any = sys.modules[self.entry.module]
        *classes, attribute = self.entry.name.split(".")
        for name in classes:
            owner = vars(owner)[name]
        return owner, attribute

    def _rebind(self, old: Any, new: Any) -> None:
        for module, name in self._bindings(old):
            if self._is_hosts(module):
                setattr(module, name, new)

    def _stale(self) -> tuple[str, ...]:
        found = self._bindings(self._original) if self.done else []
        names = (f"{m.__name__}.{name}" for m, name in found if not self._is_hosts(m))
        return tuple(sorted(names))

    def _bindings(self, value: Any) -> list[tuple[ModuleType, str]]:
        """Every global of a loaded module that is this object, which was imported from here.

        None for methods, and for names that the target's module itself imported: what others hold
        they have from elsewhere.
        """
        made_here = getattr(self._original, "__module__", None) == self.entry.module
        if "." in self.entry.name or not made_here:
            return []
        return [
            (module, name)
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            # Not vars(): it would load modules that load lazily.
            for name, held in list(object.__getattribute__(module, "__dict__").items())
            if held is value
        ]

    def _is_hosts(self, module: ModuleType) -> bool:
        return module.__name__.partition(".")[0] == self.way[0]


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
