"""Which form of a chat a template writes in full.

Templates differ in what they read: the arguments of a call as an object or as JSON text, calls and
tools inside of `function` or not. And they leave out what they do not know, in silence. So each
kind of chat is rendered once with a marker in place of every text that was given, in one form after
the other; the first in which all markers are written is that of all chats of its kind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megapack.job.data.chats import ChatTemplate
from megapack.job.data.tokenizer import Arguments, Message, TextError

# Keys of messages with text that a model reads or writes. Others are ids, names and remarks.
_TEXTS = ("content", "tool_calls", "function_call", "tools", "functions")
_REASONING = "reasoning_content"
_THOUGHT_END = "</think>"


Bind = Callable[[Sequence[Any] | None], ChatTemplate]
"""A template with the tools of one chat."""


@dataclass(frozen=True)
class _Form:
    """How calls and tools are given to a template."""

    as_text: bool
    """Arguments as JSON text, else as objects."""
    is_full: bool
    """In OpenAI's form, whatever the data leaves out of it; else as the data has them."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """In this form."""
        return list(map(self._message, messages))

    def _message(self, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        found = {**message, "tool_calls": list(map(self._call, message["tool_calls"]))}
        if self.is_full:
            found["content"] = message.get("content") or ""
        return found

    def tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        """In this form."""
        if tools is None or not self.is_full:
            return tools if tools is None else list(tools)
        return [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function: dict[str, Any] = call.get("function", call)
        given = function.get("arguments")
        if isinstance(given, Arguments):
            arguments = given.text if self.as_text else dict(given)
            function = {**function, "arguments": arguments}
        if "function" in call or self.is_full:
            own = call if "function" in call else {}
            return {**({"type": "function"} if self.is_full else {}), **own, "function": function}
        return function


Forms = dict[frozenset[Any], _Form]
"""The form of each kind of chat that one template has written."""


def fit(
    messages: Sequence[Message], tools: Sequence[Any] | None, bind: Bind, known: Forms
) -> tuple[list[Message], list[Any] | None]:
    """Messages and tools in the form that the template writes; `known` is its forms, and grows.

    Raises:
        TextError: it leaves something out in every form.
    """
    kinds = frozenset([*map(_kind, messages), _kind_of_tools(tools)])
    form = known[kinds] = known.get(kinds) or _find(messages, tools, bind)
    return form.messages(messages), form.tools(tools)


def _kind(message: Message) -> Any:
    """Equal for messages whose texts differ and whose keys do not."""
    keys = tuple(key for key in (*_TEXTS, _REASONING) if message.get(key))
    calls = {
        (*sorted(call), *sorted(_function(call)), bool(_function(call).get("arguments")))
        for call in message.get("tool_calls", ())
    }
    content = message.get("content") or ""
    if isinstance(content, list):
        kinds = tuple(part["type"] for part in content)
        return message["role"], keys, frozenset(calls), kinds
    return message["role"], keys, frozenset(calls), _THOUGHT_END in content


def _kind_of_tools(tools: Sequence[Any] | None) -> Any:
    return tools and frozenset((*sorted(tool), *sorted(_function(tool))) for tool in tools)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """The object of a call or tool that has its name."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _find(messages: Sequence[Message], tools: Sequence[Any] | None, bind: Bind) -> _Form:
    complaints = []
    for is_full, as_text in itertools.product((False, True), (False, True)):
        form = _Form(as_text, is_full)
        complaint = _complaint(messages, tools, bind, form)
        if complaint is None:
            return form
        complaints.append(complaint)
        if tools is None and not any("tool_calls" in message for message in messages):
            break
    raise TextError(complaints[0])


def _complaint(
    messages: Sequence[Message], tools: Sequence[Any] | None, bind: Bind, form: _Form
) -> str | None:
    """What the template does not write of this chat; None if all is written."""
    marks = _Marks()
    marked = form.messages([marks.message(i, message) for i, message in enumerate(messages)])
    marked_tools = form.tools(marks.tools(tools))
    last_of_kind = {_kind(message): i for i, message in enumerate(messages)}
    ends = [i for i in last_of_kind.values() if messages[i]["role"] == "assistant"]
    try:
        bound = bind(marked_tools)
        # What an assistant thought may be left out of its earlier turns.
        texts = [bound.render(marked[: end + 1]).text for end in (*ends, len(marked) - 1)]
    except TextError:
        # It may need texts that the markers are not.
        try:
            bind(form.tools(tools)).render(form.messages(messages))
        except TextError as error:
            return str(error)
        return None
    whole = "\0".join(texts)
    read = {*last_of_kind.values()}
    for marker, (index, name) in marks.names.items():
        if index in (*read, None) and marker not in whole:
            return f"has {name}, which the chat template does not write; leave it out"
    for marker in marks.keys:
        if f"'{marker}':" in whole:
            return "has arguments of a call that the chat template writes as Python, not as JSON"
        if form.as_text and f'\\"{marker}' in whole:
            return "has arguments of a call that the chat template encodes as JSON twice"
    return None


class _Marks:
    """Puts a marker in place of each text."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[int | None, str]] = {}
        """By marker: the number of the message, None = of tools, and what it stands for."""
        self.keys: list[str] = []
        """Markers of names of arguments."""

    def message(self, index: int, message: Message) -> Message:
        """The message with markers."""
        found = dict(message)
        role = message["role"]
        for key in _TEXTS:
            if message.get(key) and key not in ("content", "tool_calls"):
                found[key] = self._value(message[key], index, f"{key} of role {role}")
        content = message.get("content")
        if isinstance(content, list):
            name = f"content of role {role}"
            found["content"] = [
                {**part, "text": self._new(index, name)} if part["type"] == "text" else part
                for part in content
            ]
        elif content:
            found["content"] = self._new(index, f"content of role {role}")
            if _THOUGHT_END in content:
                thought = self._new(index, f"text before {_THOUGHT_END} of role {role}")
                found["content"] = f"<think>\n{thought}\n{_THOUGHT_END}\n\n{found['content']}"
        if message.get(_REASONING):
            thought = self._new(index, f"{_REASONING} of role {role}")
            found.update((key, thought) for key in ("thinking", "reasoning", _REASONING))
        if "tool_calls" in message:
            found["tool_calls"] = [
                self._named(call, index, "tool_calls") for call in message["tool_calls"]
            ]
        return found

    def tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        """The tools with markers as their names and those of their parameters."""
        return None if tools is None else [self._named(tool, None, "tools") for tool in tools]

    def _named(self, one: dict[str, Any], index: int | None, what: str) -> dict[str, Any]:
        """A tool or a call with markers as its name and as its parameters or arguments."""
        if isinstance(one.get("function"), dict):
            return {**one, "function": self._named(one["function"], index, what)}
        found = dict(one)
        if isinstance(one.get("name"), str) and one["name"]:
            found["name"] = self._new(index, f"{what} with names")
        if isinstance(one.get("arguments"), Arguments):
            values = {}
            for value in one["arguments"].values():
                self.keys.append(self._new(index, f"{what} with arguments"))
                values[self.keys[-1]] = self._value(value, index, f"{what} with arguments")
            found["arguments"] = Arguments(values)
            found["arguments"].text = json.dumps(values, ensure_ascii=False)
        parameters = one.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            properties = {
                self._new(index, f"{what} with parameters"): value
                for value in parameters["properties"].values()
            }
            found["parameters"] = {**parameters, "properties": properties}
        return found

    def _value(self, value: Any, index: int | None, name: str) -> Any:
        """The value with markers as its texts."""
        if isinstance(value, str):
            return self._new(index, name) if value else value
        if isinstance(value, dict):
            return {key: self._value(one, index, name) for key, one in value.items()}
        if isinstance(value, list):
            return [self._value(one, index, name) for one in value]
        return value

    def _new(self, index: int | None, name: str) -> str:
        marker = f"mark{len(self.names)}x"
        self.names[marker] = (index, name)
        return marker
