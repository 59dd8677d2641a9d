"""Chats as texts with the spans that count in the loss, by the model's own chat template.

    messages -> chat_texts -> text, spans of characters -> (hf_tokenizer) token ids, loss mask

What an assistant's turn says counts: where the template marks it (`{% generation %}`), what is
marked; else what the turn adds to the chat before it with its generation prompt, up to the
end-of-turn token. White space after that token, which no model writes, does not count.

A template may write earlier turns otherwise once later ones follow: Qwen3's leaves out what the
assistant thought before the user's last message. A turn is then trained as it was when it was
written, in a sample of its own. Turns that later ones leave unchanged share one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megapack.data.tokenizer import Message, TextError

# Characters of each text where two differ.
_SHOWN = 16

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True)
class ChatText:
    """A chat as one text."""

    text: str
    spans: list[Span]
    """What counts in the loss, in order."""


class ChatTemplate(Protocol):
    """Writes chats as text."""

    has_marks: bool
    """Whether it marks what the assistant generates."""
    special_texts: tuple[str, ...]
    """The special tokens, one of which may end a turn."""

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """The text of these messages; `asks` adds the generation prompt."""
        ...

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text, and the spans that the template marks as generated."""
        ...


def chat_texts(
    messages: Sequence[Message], template: ChatTemplate, first: int = 0
) -> list[ChatText]:
    """The samples of a chat: one, or several if the template rewrites earlier turns.

    What follows the last turn of the assistant is left out: nothing in it would count.

    Args:
        first: only turns from this message on count in the loss.

    Raises:
        TextError: no turn counts, or the template does not show where a turn begins.
    """
    turns = [
        index
        for index, message in enumerate(messages)
        if index >= first and message["role"] == "assistant"
    ]
    if not turns:
        raise TextError("has no turn of the assistant, so that no token counts; leave it out")
    rendered = {turn: template.render(messages[: turn + 1]) for turn in turns}
    chains = [[turns[0]]]
    for before, turn in itertools.pairwise(turns):
        if rendered[turn].startswith(rendered[before]):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    find = _marked if template.has_marks else _added
    return [
        ChatText(rendered[chain[-1]], find(messages, template, chain, rendered)) for chain in chains
    ]


def _marked(
    messages: Sequence[Message], template: ChatTemplate, chain: list[int], rendered: dict[int, str]
) -> list[Span]:
    """The marked spans of these turns."""
    text, spans = template.render_marked(messages[: chain[-1] + 1])
    if text != rendered[chain[-1]]:
        raise TextError(
            f"is written in two ways by the template, {_difference(rendered[chain[-1]], text)}; "
            "correct the template"
        )
    begin = 0
    if any(message["role"] == "assistant" for message in messages[: chain[0]]):
        before = template.render(messages[: chain[0]])
        if not text.startswith(before):
            raise _rewritten(chain[0], before, text)
        begin = len(before)
    found = [(max(start, begin), stop) for start, stop in spans if stop > max(start, begin)]
    # A turn without a mark would go untrained in silence.
    for turn in chain:
        end = len(rendered[turn])
        if not any(start < end and stop > begin for start, stop in found):
            raise TextError(
                f"[{turn}]: the template's generation marks leave no text of this turn; correct "
                "the template"
            )
        begin = end
    return found


def _added(
    messages: Sequence[Message], template: ChatTemplate, chain: list[int], rendered: dict[int, str]
) -> list[Span]:
    """What each of these turns adds to the chat before it with its generation prompt."""
    spans = []
    for turn in chain:
        try:
            before = template.render(messages[:turn], asks=True)
        except TextError:
            if turn:
                raise
            raise TextError(
                "begins with a turn of the assistant, before which the template writes no "
                "generation prompt; put a system or user message first, or leave it out"
            ) from None
        text = rendered[turn]
        if not text.startswith(before):
            raise _rewritten(turn, before, text)
        end = text.rstrip()
        stop = len(end) if end.endswith(template.special_texts) else len(text)
        if stop == len(before):
            raise TextError(f"[{turn}]: the template writes nothing for this turn; leave it out")
        spans.append((len(before), stop))
    return spans


def _rewritten(turn: int, before: str, text: str) -> TextError:
    return TextError(
        f"[{turn}]: the template does not write this turn after its generation prompt, "
        f"{_difference(before, text)}, so that its beginning is unknown; give a template with "
        "generation marks, or token ids"
    )


def _difference(one: str, other: str) -> str:
    """A few characters of two texts from where they differ."""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    first = sum(1 for _ in shared)
    return f"{one[first : first + _SHOWN]!r} there and {other[first : first + _SHOWN]!r} here"
