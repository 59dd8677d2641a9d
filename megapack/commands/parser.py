"""The parser of a command: short help, and errors that name options as they are typed."""

from __future__ import annotations

import argparse
import logging
import re
from dataclasses import fields
from typing import Any, NoReturn

from megapack.errors import DataError, MegapackError

# A name of the API in a message: a word with an underscore, or before "=" and its value. Paths,
# dotted keys of a config and quoted text are left alone.
_NAME = re.compile(r"""(?<![\w./'"<*-])([a-z][a-z0-9_]*)(?:=(['"]?)(\w+)\2|(?![\w/'"=-]|\.\w))""")

_YAML = {"None": "null", "True": "true", "False": "false"}


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, and leaves options of topics out of `--help`."""

    topic = ""
    """The topic whose options `format_help` shows; "": those without a topic."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._topics: dict[str, argparse._ArgumentGroup] = {}
        own: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **(own | {"allow_abbrev": False} | settings))

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"megapack: {message}; see {self.prog} --help\n")

    def add_topic(self, topic: str, what: str, title: str) -> argparse._ArgumentGroup:
        """A group of options that `--help` leaves out, and `--help-TOPIC`, which shows them."""
        settings: dict[str, Any] = {"dest": argparse.SUPPRESS, "nargs": 0, "help": f"show {what}"}
        self.add_argument(f"--help-{topic}", action=_HelpOf, const=topic, **settings)
        self._topics[topic] = self.add_argument_group(title)
        return self._topics[topic]

    def format_usage(self) -> str:
        """The positional arguments and the required options; help lists the rest."""
        self._set_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """The options without a topic, or those of `topic`."""
        self._set_usage()
        everything = self._action_groups
        hidden = self._topics.values()
        shown = [group for group in everything if group not in hidden]
        self._action_groups = [self._topics[self.topic]] if self.topic else shown
        try:
            return self.in_own_words(super().format_help())
        finally:
            self._action_groups = everything

    def _set_usage(self) -> None:
        shown = [a for a in self._actions if not a.option_strings or a.required]
        if self.usage is not None or any(a.nargs in ("A...", "...") for a in shown):
            return
        words = []
        for action in shown:
            name = str(action.metavar or action.dest)
            if action.option_strings:
                name = f"{action.option_strings[-1]} {name}"
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
        self.usage = " ".join(["%(prog)s", *words, "[options]"])

    def in_own_words(self, message: str) -> str:
        """A message of the API with its names as this command has them: `max_tokens_per_gpu` as
        `--max-tokens-per-gpu`, or as `plan.max_tokens_per_gpu` where a config has it."""
        names = {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings}
        if "overrides" in {action.dest for action in self._actions}:
            names = _config_names()

        def own(found: re.Match[str]) -> str:
            name, _, value = found.groups()
            if name not in names or (value is None and "_" not in name):
                return found[0]
            return _setting(names[name], value)

        return _NAME.sub(own, message)


class OwnWords(logging.Formatter):
    """A warning in the words of a command, see `Parser.in_own_words`."""

    def __init__(self, parser: Parser) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._parser = parser

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        record.message = self._parser.in_own_words(record.message)
        return super().formatMessage(record)


def message_of(error: MegapackError, parser: Parser) -> str:
    """An error's message in the words of a command; those about data quote the data's own names."""
    return str(error) if isinstance(error, DataError) else parser.in_own_words(str(error))


def _setting(name: str, value: str | None) -> str:
    """A name with its value: an option as it is typed, or `section.key=value`."""
    if value is None:
        return name
    if not name.startswith("--"):
        return f"{name}={_YAML.get(value, value)}"
    if value not in _YAML:
        return f"{name}={value}"
    is_off = value != "True"
    return name if is_off == name.startswith("--no-") else f"no {name}"


def _config_names() -> dict[str, str]:
    from megapack.job.config.plan import LayoutConfig, PlanConfig

    sections = {"layout": LayoutConfig, "plan": PlanConfig}
    return {key.name: f"{name}.{key.name}" for name, cls in sections.items() for key in fields(cls)}


class _HelpOf(argparse.Action):
    """`--help-TOPIC`: print the options of a topic, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.topic = str(self.const)
        parser.print_help()
        parser.exit()
