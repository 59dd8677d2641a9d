"""Chats of a data file -> one normal form for all templates, and which of their turns count.

A message of that form has its content as text, or with images as parts, reasoning under each name
that templates read, and the arguments of calls as objects. What says whether it counts is taken out
of it: no template reads that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megapack.base.files import strict_json
from megapack.job.data.tokenizer import Arguments, Message

# By these a message says whether it counts in the loss: 0 or 1, false or true.
_COUNTS = ("weight", "loss_mask", "loss", "train", "training", "trainable")
# Keys that say more than that, or that fields read in opposite ways.
_UNREAD = {
    **dict.fromkeys(("mask", "masked"), "say by weight whether it counts: 0 or 1"),
    **dict.fromkeys(
        ("train_detail", "training_detail", "loss_scale", "loss_weight"),
        "a turn counts as a whole: give weight 0 or 1",
    ),
    **dict.fromkeys(
        ("prefix", "partial"), "the beginning of a turn is not trained by itself; give the turn"
    ),
}
_ASSISTANT = "assistant"


class BadLine(Exception):
    """Why a line is refused; the caller adds file and line number."""


@dataclass(frozen=True)
class Conversation:
    """A chat in the normal form."""

    messages: list[Message]
    counts: list[bool]
    """Per message: whether it is the assistant's and counts in the loss."""

    def turns(self, first: int) -> list[int]:
        """The numbers of the messages from `first` on that count."""
        return [index for index, counts in enumerate(self.counts) if counts and index >= first]

    def why_no_turns(self, first: int) -> str:
        """Why none counts of the messages from `first` on."""
        roles = [message["role"] for message in self.messages[first:]]
        which = "that counts" if _ASSISTANT in roles else "of the assistant"
        return f"has no turn {which}, so that no token counts; leave it out"


def conversation(prompt: Any, key: str, value: Any) -> Conversation:
    """The whole chat of the column `key`.

    `prompt` may be the messages before it, or the text of the user's turn. A chat that has them
    itself is whole.
    """
    chat = _conversation(key, value)
    begins_with_answer = chat.messages[0]["role"] == _ASSISTANT
    if prompt is None:
        return chat
    if not isinstance(prompt, str):
        before = _conversation("prompt", prompt)
        if chat.messages[: len(before.messages)] == before.messages:
            both = zip(before.counts, chat.counts, strict=False)
            counts = [one and other for one, other in both]
            return Conversation(chat.messages, counts + chat.counts[len(counts) :])
        if not begins_with_answer:
            raise BadLine(
                f"{key} begins neither with the messages of prompt nor with a turn of the "
                "assistant; leave prompt out"
            )
        return Conversation(before.messages + chat.messages, before.counts + chat.counts)
    if begins_with_answer:
        user = {"role": "user", "content": prompt}
        return Conversation([user, *chat.messages], [False, *chat.counts])
    if not any(one["role"] == "user" and one.get("content") == prompt for one in chat.messages):
        raise BadLine(f"prompt is no user's turn of {key}; leave prompt out")
    return chat


def filled(value: Any) -> Any:
    """Without the keys that are null: Parquet gives all rows the keys that one of them has.

    A message's `content` stays, as in `_message`.
    """
    if isinstance(value, list):
        return [filled(one) for one in value]
    if isinstance(value, dict):
        return {
            name: filled(one)
            for name, one in value.items()
            if one is not None or (name == "content" and "role" in value)
        }
    return value


def tools_of(row: dict[str, Any]) -> list[Any] | None:
    """The `tools` column: a list, or its JSON, as Parquet files have it."""
    tools = _parsed("tools", row.get("tools"))
    if tools is not None and not _are_objects(tools):
        raise BadLine(f"tools is {shown(tools)}, expected a list of objects")
    return tools or None


def template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """The `chat_template_kwargs` column: an object, or its JSON."""
    name = "chat_template_kwargs"
    arguments = _parsed(name, row.get(name, {}))
    if not isinstance(arguments, dict):
        raise BadLine(f"{name} is {shown(arguments)}, expected an object of template arguments")
    return arguments


def shown(value: Any) -> str:
    """A value of a line for its error, cut to 40 characters."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "nested brackets"
    return text if len(text) <= 40 else text[:37] + "..."


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return strict_json(value)
    except ValueError as error:
        raise BadLine(f"{name} is text and not JSON: {error}") from None


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _conversation(key: str, value: Any) -> Conversation:
    if not isinstance(value, list) or not value:
        raise BadLine(f"{key} is {shown(value)}, expected a list of messages")
    pairs = [_message(f"{key}[{index}]", message) for index, message in enumerate(value)]
    return Conversation([message for message, _ in pairs], [counts for _, counts in pairs])


def _message(name: str, message: Any) -> tuple[Message, bool]:
    """A message in the normal form, and whether it counts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadLine(f"{name} is {shown(message)}, expected an object with role and content")
    # Templates ask whether a message has a key at all, but whether its `content` is null.
    found = {key: one for key, one in message.items() if one is not None or key == "content"}
    for key, remedy in _UNREAD.items():
        # "prefix": false says nothing.
        if found.pop(key, False) is not False:
            raise BadLine(f"{name} has {key}, which is not read; {remedy}")
    counts = _counts(name, found)
    content = found.get("content")
    calls = found.get("tool_calls")
    if content is None and not calls:
        raise BadLine(f"{name} has neither content nor tool_calls; give its text as content")
    if isinstance(content, list):
        found["content"] = _parts(f"{name}.content", content)
    elif content is not None and not isinstance(content, str):
        raise BadLine(f"{name}.content is {shown(content)}, expected a string")
    if calls is not None:
        found["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    return _with_reasoning(name, found), counts


def _counts(name: str, message: dict[str, Any]) -> bool:
    """Whether the message counts in the loss; the keys that say so are taken out."""
    said: dict[bool, str] = {}
    for key in _COUNTS:
        if key in message:
            value = message.pop(key)
            if not isinstance(value, int | float) or value not in (0, 1):
                raise BadLine(f"{name}.{key} is {shown(value)}, expected 0 or 1, or true or false")
            said[bool(value)] = key
    if len(said) == 2:
        raise BadLine(f"{name} counts by {said[True]}, and not by {said[False]}; give one of them")
    is_assistant = message["role"] == _ASSISTANT
    if True in said and not is_assistant:
        raise BadLine(
            f"{name} counts by {said[True]}, but is of role {shown(message['role'])}: only the "
            f"assistant's turns count; leave {said[True]} out"
        )
    return is_assistant and False not in said


def _parts(name: str, parts: list[Any]) -> str | list[dict[str, Any]]:
    """The text of a content that is given in parts, as OpenAI's messages may be.

    With images it stays in parts: {"type": "text", "text": ...}, {"type": "image", "image": ...};
    the latter without a source if the data give none.
    """
    found = [_part(f"{name}[{index}]", part) for index, part in enumerate(parts)]
    if not parts:
        raise BadLine(f"{name} is [], expected a string or parts of text")
    if any(part["type"] == "image" for part in found):
        return found
    return "".join(part["text"] for part in found)


# The keys under which transformers looks for an image.
_SOURCES = ("image", "url", "path")


def _part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        sources = {key: part[key] for key in _SOURCES if part.get(key) is not None}
        if len(sources) > 1:
            raise BadLine(f"{name} has both {' and '.join(sources)}; give one of them")
        return {"type": "image", **({"image": sources.popitem()[1]} if sources else {})}
    if kind == "image_url":
        url = part.get("image_url")
        return {"type": "image", "image": url.get("url", "") if isinstance(url, dict) else url}
    if kind in ("video", "video_url", "audio", "input_audio", "audio_url"):
        raise BadLine(f"{name} is of type {kind}: only text and images are trained; leave it out")
    raise BadLine(
        f'{name} is {shown(part)}, expected an object of type "text" with text, or of type "image"'
    )


def image_parts(message: Message) -> list[dict[str, Any]]:
    """The images of a message in the normal form."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if part["type"] == "image"]


def _calls(name: str, calls: Any) -> list[Any]:
    """Tool calls whose arguments are objects."""
    if not _are_objects(calls):
        raise BadLine(f"{name} is {shown(calls)}, expected a list of objects")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name", ""), str):
            raise BadLine(f"{name}[{index}] is {shown(call)}, expected a function with its name")
        if function.get("arguments") is not None:
            where = f"{name}[{index}]: arguments"
            function = {**function, "arguments": _arguments(where, function["arguments"])}
        found.append({**call, "function": function} if "function" in call else function)
    return found


def _arguments(name: str, given: Any) -> Arguments:
    arguments = given
    if isinstance(given, str):
        try:
            arguments = strict_json(given)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise BadLine(f"{name} is {shown(given)}, expected an object, or the JSON of one")
    found = Arguments(arguments)
    found.text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return found


_REASONING: Sequence[str] = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(name: str, message: dict[str, Any]) -> Message:
    """What the assistant thought under the names that templates read, as transformers gives it."""
    given = {key: message[key] for key in _REASONING if key in message}
    if not given:
        return message
    for key, value in given.items():
        if not isinstance(value, str):
            raise BadLine(f"{name}.{key} is {shown(value)}, expected a string")
    if len(set(given.values())) > 1:
        raise BadLine(f"{name} has other text in {' and '.join(given)}; give one of them")
    (text,) = set(given.values())
    return {"thinking": text, **message, "reasoning_content": text}
