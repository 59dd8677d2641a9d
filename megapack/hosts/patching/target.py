"""One name of a host: verify its signature against text, replace it, restore it."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import inspect
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from types import ModuleType
from typing import Any, Literal

from megapack.errors import ConfigError, PatchError
from megapack.hosts.patching.files import PatchFile, Replacement

logger = logging.getLogger(__name__)

State = Literal["applied", "waiting", "lost"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one patched name."""

    host: str
    target: str
    """Dotted path of the name."""
    replacement: str
    state: State
    """"waiting" for its module's import; "lost": other code has replaced the name since."""
    stale: tuple[str, ...]
    """Names that still hold the original: outside the host, imported before the patch. With
    `rebinds: everywhere`, imported after the patch from the module that defines the name."""


class Patch:
    """One replacement of a patch file in this process."""

    def __init__(self, file: PatchFile, entry: Replacement) -> None:
        self.file = file
        self.entry = entry
        self._original: Any = None
        self._replacement: Any = None
        self._own_copies: list[tuple[ModuleType, str]] = []
        """Globals that held the replacement before this patch: imported from megapack."""
        parts = entry.module.split(".")
        self.module_chain = [".".join(parts[: end + 1]) for end in range(len(parts))]
        """The target's module after the packages that contain it: a, a.b, a.b.c."""

    @property
    def is_replaced(self) -> bool:
        """Whether the name was replaced."""
        return self._replacement is not None

    @property
    def original(self) -> Any:
        """The host's own object; None before the name is replaced."""
        return self._original

    @property
    def is_imported(self) -> bool:
        """Whether the target's module is imported."""
        return self.entry.module in sys.modules

    def verify(self) -> None:
        """Refuse a missing module, a missing name, or a name with an unexpected signature.

        Checks what the imported modules show; imports nothing of the host.
        """
        if self.is_replaced:
            return
        if self.is_imported:
            self._verify_name()
            self._import_replacement()
            return
        # Without this check the patch would silently wait for an import that never comes.
        for package, below in itertools.pairwise(self.module_chain):
            path = getattr(sys.modules.get(package), "__path__", None)
            if path is None or below in sys.modules:
                continue
            if importlib.machinery.PathFinder.find_spec(below, path) is None:
                raise self._mismatch(f"expected a module {below}, found none")

    def _verify_name(self) -> None:
        expected = self.entry.expected
        try:
            owner, attribute = self._owner_and_attribute()
            target = _hosts_own(vars(owner)[attribute])
        except KeyError:
            raise self._mismatch(f"expected {expected}, found no such name") from None
        if not callable(target):
            raise self._mismatch(
                f"expected {expected}, found an object of type {type(target).__name__}"
            )
        found = signature_of(target)
        if not accepts(self.entry, found):
            raise self._mismatch(f"expected {expected}, found {found}")

    def _mismatch(self, what: str) -> PatchError:
        host = self.file.host
        installed = self.file.version or "unknown"
        return PatchError(
            f"{self.entry.dotted}: {what}; the patches for {host} are for {self.file.seen} and the "
            f"installed version is {installed}: install such a version, or run without "
            "the patch"
        )

    def _import_replacement(self) -> Any:
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

    def replace(self) -> None:
        """Replace the name, and its copies in the host's own modules; does nothing when called
        again."""
        if self.is_replaced:
            return
        owner, attribute = self._owner_and_attribute()
        self._original = _hosts_own(vars(owner)[attribute])
        replacement = self._import_replacement()
        self._own_copies = self._bindings(replacement)
        name = self.entry.replacement.replace(":", ".")
        change = f"is now {name}"
        if self.entry.argument is not None:
            replacement = _reading(self._original, self.entry.argument, replacement)
            change = f"tells {name} its {self.entry.argument}"
        setattr(owner, attribute, replacement)
        self._replacement = replacement
        _REPLACED.append(self)
        logger.info("%s: %s %s (%s)", self.file.host, self.entry.dotted, change, self.entry.why)
        self._rebind(self._original, replacement)
        for name in self._stale():
            logger.warning(
                "%s still holds the original %s; apply the patch before that import",
                name,
                self.entry.dotted,
            )

    def restore(self) -> None:
        """Restore the original, also in the host's modules that imported the replacement."""
        _REPLACED.remove(self)
        owner, attribute = self._owner_and_attribute()
        if vars(owner).get(attribute) is self._replacement:
            setattr(owner, attribute, self._value_without())
            logger.info("%s: %s is the host's own again", self.file.host, self.entry.dotted)
        else:
            logger.warning("%s: other code replaced it since; left as it is", self.entry.dotted)
        self._rebind(self._replacement, self._original)

    def status(self) -> Status:
        """Whether the name is replaced now, and which modules hold the original."""
        state: State = "waiting"
        if self.is_replaced:
            owner, attribute = self._owner_and_attribute()
            state = "applied" if vars(owner).get(attribute) is self._replacement else "lost"
        return Status(
            host=self.file.host,
            target=self.entry.dotted,
            replacement=self.entry.replacement.replace(":", "."),
            state=state,
            stale=self._stale(),
        )

    def _owner_and_attribute(self) -> tuple[Any, str]:
        """The loaded module or class that holds the name, and the attribute's name there."""
        owner: Any = sys.modules[self.entry.module]
        *classes, attribute = self.entry.name.split(".")
        for name in classes:
            owner = vars(owner)[name]
        return owner, attribute

    def _value_without(self) -> Any:
        """What the name holds without this patch: the host's own object, or what another patch of
        that object puts into this module."""
        module = sys.modules[self.entry.module]
        others = [patch for patch in _REPLACED if patch._original is self._original]
        values = [patch._replacement for patch in others if patch._covers(module)]
        return values[0] if values else self._original

    def _rebind(self, old: Any, new: Any) -> None:
        for module, name in self._bindings(old):
            if self._covers(module) and (module, name) not in self._own_copies:
                setattr(module, name, new)

    def _stale(self) -> tuple[str, ...]:
        bindings = self._bindings(self._original) if self.is_replaced else []
        # The host's modules are covered, and what is left is outside of it; where every module is
        # covered, what is left is inside: imported since, from the module that defines the name.
        left = self.entry.rebinds == "everywhere"
        return tuple(sorted({f"{m.__name__}.{n}" for m, n in bindings if self._covers(m) is left}))

    def _bindings(self, value: Any) -> list[tuple[ModuleType, str]]:
        """Every global of a loaded module that is this object; empty if copies are not rebound."""
        if not self._has_copies():
            return []
        return [
            (module, name)
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            # vars() would load lazy modules.
            for name, held in list(object.__getattribute__(module, "__dict__").items())
            if held is value
        ]

    def _has_copies(self) -> bool:
        """Whether globals of other modules count as copies of the name.

        Never for methods. For a name that the target's module itself imported only with
        `everywhere`: others imported it from elsewhere.
        """
        if "." in self.entry.name:
            return False
        return self.entry.rebinds == "everywhere" or self._definer() == self.entry.module

    def _covers(self, module: ModuleType) -> bool:
        """Whether copies in this module are rebound."""
        root = module.__name__.partition(".")[0]
        if not self._has_copies():
            return False
        if self.entry.rebinds == "host":
            return root == self.module_chain[0]
        return root != "megapack" and module.__name__ != self._definer()

    def _definer(self) -> str | None:
        """The module that defines the original."""
        return getattr(self._original, "__module__", None)


# Patches whose names are replaced now.
_REPLACED: list[Patch] = []


def _hosts_own(value: Any) -> Any:
    """The host's own object, where another patch's replacement of it is what is found."""
    originals = (patch._original for patch in _REPLACED if patch._replacement is value)
    return next(originals, value)


def _reading(original: Any, argument: str, read: Callable[[Any], Any]) -> Any:
    """The host's function, which calls `read` with one of its arguments first.

    What `read` returns, if anything, takes the argument's place.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given.arguments[argument] = read(given.arguments[argument]) or given.arguments[argument]
        return original(*given.args, **given.kwargs)

    return call


def accepts(entry: Replacement, found: inspect.Signature) -> bool:
    """Whether a target with this signature can be replaced."""
    if entry.argument is not None:
        return entry.argument in found.parameters
    return any(is_like(found, parse_signature(text)) for text in entry.signatures)


def parse_signature(text: str) -> inspect.Signature:
    """`(a, b=None, *, c)` as a signature; defaults are literals, nothing is evaluated.

    Raises:
        ConfigError: the text is not a signature.
    """
    try:
        (function,) = ast.parse(f"def f{text}: pass").body
        assert isinstance(function, ast.FunctionDef)
        return inspect.Signature(parameters_of(function.args))
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(f"{text!r:.80} is not a signature; write (a, b=None, *, c)") from None


def signature_of(target: Any) -> inspect.Signature:
    """The signature of a function, or of a class's constructor, without annotations.

    Raises:
        ValueError, TypeError: it has no signature, like some built-in functions.
    """
    found = inspect.signature(target)
    parameters = [p.replace(annotation=Parameter.empty) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def is_like(found: inspect.Signature, expected: inspect.Signature) -> bool:
    """Whether names, kinds and defaults are equal; the expected default `...` matches any."""
    parameters = list(found.parameters.values())
    wanted = list(expected.parameters.values())
    return len(parameters) == len(wanted) and all(map(_same, parameters, wanted))


def _same(found: Parameter, expected: Parameter) -> bool:
    if (found.name, found.kind) != (expected.name, expected.kind):
        return False
    if expected.default is ...:
        return found.default is not Parameter.empty
    # 1 == True == 1.0, but their texts differ.
    return repr(found.default) == repr(expected.default)


def parameters_of(
    args: ast.arguments, value: Callable[[ast.expr], Any] = ast.literal_eval
) -> list[Parameter]:
    """The parameters that a function's source lists, without annotations.

    Args:
        args: of a parsed function.
        value: what a default's source means.
    """
    positional: list[tuple[ast.arg, Any]] = [
        (arg, Parameter.POSITIONAL_ONLY) for arg in args.posonlyargs
    ]
    positional += [(arg, Parameter.POSITIONAL_OR_KEYWORD) for arg in args.args]
    no_default: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    listed = [*zip(positional, [*no_default, *args.defaults], strict=True)]
    found = [(arg, kind, default) for (arg, kind), default in listed]
    if args.vararg:
        found.append((args.vararg, Parameter.VAR_POSITIONAL, None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((arg, Parameter.KEYWORD_ONLY, default))
    if args.kwarg:
        found.append((args.kwarg, Parameter.VAR_KEYWORD, None))
    return [
        Parameter(arg.arg, kind, default=Parameter.empty if default is None else value(default))
        for arg, kind, default in found
    ]
