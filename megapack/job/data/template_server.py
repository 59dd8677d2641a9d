"""What runs in the process of `templates`: requests from standard input, samples to the output."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megapack.errors import first_line
from megapack.job.data.chats import ChatTemplate, ChatText, chat_texts
from megapack.job.data.forms import Forms, fit
from megapack.job.data.processes import answer_messages
from megapack.job.data.templates import MAX_SECONDS, TemplateSource
from megapack.job.data.tokenizer import Chat, Message, TextError

# Beyond what the process has before it reads a template.
_MAX_GIB = 2
_MAX_CHARS = 1 << 26
# Today for templates that write the date: that of Llama's templates where there is no clock.
_TODAY = datetime.datetime(2024, 7, 26)
# What a template gets from the chat itself.
_OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def serve() -> None:
    """Answer requests until the input ends."""
    # Nothing of Python has to run for it to end the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with open("/proc/self/statm", encoding="ascii") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + (_MAX_GIB << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer_messages(lambda message: write_chat(*message))


def write_chat(source: TemplateSource, chat: Chat) -> list[ChatText]:
    """The samples of a chat. A template that runs for too long ends this process."""
    if not chat.turns:
        return []
    program = _program(source.text)
    known = program.names - _OWN - source.specials.keys()
    for name in chat.arguments:
        if name not in known:
            raise TextError(
                f"has the template argument {name:.40}, but the chat template reads "
                f"{', '.join(sorted(known)) or 'none'}; correct chat_template_kwargs"
            )
    values = {**source.specials, **chat.arguments}

    def bind(tools: Sequence[Any] | None) -> ChatTemplate:
        write = functools.partial(_render, program, {**values, "tools": tools})
        has_marks = program.marks.num_tags > 0
        return ChatTemplate(write, has_marks, source.special_texts, source.end_texts)

    messages = chat.messages[: chat.turns[-1] + 1]
    # Arguments may decide what is written.
    forms = _forms(source.text, repr(sorted(chat.arguments.items())))
    fitting, tools = fit(messages, chat.tools, bind, forms)
    return chat_texts(fitting, bind(tools), chat.turns)


@functools.lru_cache(maxsize=64)
def _forms(text: str, arguments: str) -> Forms:
    return {}


@dataclass(frozen=True)
class _Program:
    """A template that has been compiled."""

    template: jinja2.Template
    marks: _Marks
    names: frozenset[str]
    """Variables that it reads from outside."""


@functools.lru_cache(maxsize=8)
def _program(text: str) -> _Program:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals.update(
        raise_exception=_refuse, strftime_now=_TODAY.strftime, namespace=_Variables, dict=_dict
    )
    marks = environment.extensions[_Marks.identifier]
    assert isinstance(marks, _Marks)
    with _limits():
        # Constants are computed here.
        template = environment.from_string(text)
        names = find_undeclared_variables(environment.parse(text)) - environment.globals.keys()
    return _Program(template, marks, frozenset(names))


def _render(
    program: _Program, values: Mapping[str, Any], messages: Sequence[Message], asks: bool
) -> ChatText:
    """The text of messages; `values` are those that the template reads, by name."""
    marks = program.marks
    marks.found = []
    marks.num_chars = 0
    blocks = []
    values = {**values, "messages": list(messages), "documents": None}
    values["add_generation_prompt"] = asks
    with _limits():
        for block in program.template.generate(values):
            blocks.append(block)
            marks.num_chars += len(block)
            if marks.num_chars > _MAX_CHARS:
                raise TextError(f"becomes more than {_MAX_CHARS} characters by the template")
    text = "".join(blocks)
    spans = [(start, start + len(marked)) for start, marked in marks.found]
    for (start, stop), (_, marked) in zip(spans, marks.found, strict=True):
        if text[start:stop] != marked:
            raise TextError("has generation marks inside of a macro; correct the template")
    return ChatText(text, spans)


class _Marks(Extension):
    """The tag `generation`, as transformers has it: what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.num_tags = 0
        self.num_chars = 0
        """Characters that have been written."""
        self.found: list[tuple[int, str]] = []
        """Where each marked text begins, and the text."""

    def parse(self, parser: Parser) -> nodes.Node:
        """See `Extension`."""
        line = next(parser.stream).lineno
        self.num_tags += 1
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """Called for each marked text of a chat."""
        text = caller()
        self.found.append((self.num_chars, text))
        return text


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End this process after the limit of time; every other failure is a TextError."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    except TextError:
        raise
    except MemoryError:
        raise TextError(
            f"makes the chat template need more than {_MAX_GIB} GiB; correct the template"
        ) from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise TextError(f"is refused by the chat template ({first_line(error)})") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# What transformers gives to templates.


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter writes `<` as an escape."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    """In place of the class, whose methods lead to others."""
    return dict(*pairs, **values)


class _Variables(Namespace):
    """A namespace that keeps no names with which Python looks into an object."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError("a namespace has no names that begin with _")
        super().__setitem__(name, value)
