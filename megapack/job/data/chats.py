"""Chats as texts with the spans that count in the loss, by the model's own chat template.

    messages -> chat_texts -> text, spans of characters -> (hf_tokenizer) token ids, loss mask

What an assistant's turn says counts: where the template marks it (`{% generation %}`), what is
marked; else what the turn adds to the chat before it with its generation prompt, up to the
end-of-turn token. White space after that token, which no model writes, does not count.

So does the token that ends the turn, or a model could not learn to stop. Where a template writes
none, engines stop at the special token that begins the next message (GLM: `<|user|>` after an
answer, `<|observation|>` after a call): it counts, and a turn that ends the chat gets one.

A template may write earlier turns otherwise once later ones follow: Qwen3's leaves out what the
assistant thought before the user's last message; Phi-3's ends a chat with EOS. A turn is then
trained as it was when it was written, in a sample of its own. Turns that later ones leave unchanged
share one sample.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapack.job.data.tokenizer import Message, TextError

# Characters of each text where two differ.
_SHOWN = 16

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True)
class ChatText:
    """A chat as one text."""

    text: str
    spans: list[Span]
    """What counts in the loss, in order; of the template's own rendering, what it marks."""
    num_messages: int = 0
    """Of a sample: those that it has, from the first on."""


@dataclass(frozen=True)
class ChatTemplate:
    """Writes chats as text."""

    write: Callable[[Sequence[Message], bool], ChatText]
    """See `render`."""
    has_marks: bool
    """Whether it marks what the assistant generates."""
    special_texts: tuple[str, ...]
    """The special tokens, one of which may end a turn."""
    end_texts: tuple[str, ...]
    """Those at which an engine stops, the tokenizer's EOS first."""

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> ChatText:
        """The text of these messages; `asks` adds the generation prompt."""
        return self.write(messages, asks)


def chat_texts(
    messages: Sequence[Message], template: ChatTemplate, turns: Sequence[int]
) -> list[ChatText]:
    """The samples of a chat: one, or several if the template rewrites earlier turns.

    What follows the last of the turns is left out: nothing in it would count.

    Args:
        turns: numbers of the messages that count in the loss, in order: turns of the assistant.

    Raises:
        TextError: the template does not show where a turn begins, or no token ends it.
    """
    find = _marked if template.has_marks else _added
    chains: list[list[ChatText]] = []
    for turn in turns:
        found = find(messages, template, turn)
        if chains and found.text.startswith(chains[-1][-1].text):
            chains[-1].append(found)
        else:
            chains.append([found])
    endings = _Endings(template)
    numbers = iter(turns)
    return [
        endings.ended(messages, list(itertools.islice(numbers, len(chain))), chain)
        for chain in chains
    ]


def _marked(messages: Sequence[Message], template: ChatTemplate, turn: int) -> ChatText:
    """The chat up to this turn, and what is marked of the turn."""
    whole = template.render(messages[: turn + 1])
    # By their number: how the chat before it ends may be rewritten.
    has_turns = any(message["role"] == "assistant" for message in messages[:turn])
    num_before = len(template.render(messages[:turn]).spans) if has_turns else 0
    spans = [(start, stop) for start, stop in whole.spans[num_before:] if stop > start]
    # A turn without a mark would go untrained in silence.
    if not spans:
        raise TextError(
            f"[{turn}]: the template's generation marks leave no text of this turn; correct the "
            "template"
        )
    return ChatText(whole.text, spans)


def _added(messages: Sequence[Message], template: ChatTemplate, turn: int) -> ChatText:
    """The chat up to this turn, and what this adds to the chat with its generation prompt."""
    text = template.render(messages[: turn + 1]).text
    try:
        before = template.render(messages[:turn], asks=True).text
    except TextError:
        if turn:
            raise
        raise TextError(
            "begins with a turn of the assistant, before which the template writes no "
            "generation prompt; put a system or user message first, or leave it out"
        ) from None
    if not text.startswith(before):
        raise TextError(
            f"[{turn}]: the template does not write this turn after its generation prompt, "
            f"{_difference(before, text)}, so that its beginning is unknown; give a template with "
            "generation marks, or token ids"
        )
    end = text.rstrip()
    stop = len(end) if end.endswith(template.special_texts) else len(text)
    if stop <= len(before):
        raise TextError(f"[{turn}]: the template writes nothing for this turn; leave it out")
    return ChatText(text, [(len(before), stop)])


class _Endings:
    """Finds, or adds, the tokens that end turns."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        texts = sorted({*template.special_texts, *template.end_texts}, key=len, reverse=True)
        self._special = re.compile(rf"\s*({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def ended(
        self, messages: Sequence[Message], turns: list[int], chain: list[ChatText]
    ) -> ChatText:
        """The sample of turns that share one text."""
        text = chain[-1].text
        spans: list[Span] = []
        for turn, found in zip(turns, chain, strict=True):
            start, stop = found.spans[-1]
            if not self._ends(text[start:stop].rstrip()):
                marker = self._special.match(text, stop)
                if marker is None and text[stop:].strip():
                    raise TextError(
                        f"[{turn}]: no special token ends this turn, "
                        f"{text[stop : stop + _SHOWN]!r} follows it, so that no model could learn "
                        "to stop; give a template that writes one"
                    )
                if marker is None:
                    text += self._at_the_end(messages, turn)
                stop = len(text) if marker is None else marker.end()
            spans += [*found.spans[:-1], (start, stop)]
        return ChatText(text, spans, turns[-1] + 1)

    def _ends(self, text: str) -> bool:
        """Whether the text of a turn ends with the token that ends turns."""
        # `</tool_call>` may be a special token too.
        return text.endswith(self._template.end_texts) or (
            text.endswith(self._template.special_texts) and self._are_written
        )

    @cached_property
    def _are_written(self) -> bool:
        """Whether the template itself ends a turn of text by a special token."""
        try:
            text = self._template.render(_EXAMPLE[:2]).text
        except TextError:
            return True
        return text.rpartition(_ANSWER)[2].rstrip().endswith(self._template.special_texts)

    def _at_the_end(self, messages: Sequence[Message], turn: int) -> str:
        """What ends a turn at the end of the chat."""
        calls = messages[turn].get("tool_calls")
        chat = [*messages[: turn + 1], _RESULT] if calls else _EXAMPLE
        try:
            before, after = (self._template.render(part).text for part in (chat[:-1], chat))
            marker = self._special.match(after, len(before)) if after.startswith(before) else None
        except TextError:
            marker = None
        next_text = "" if marker is None else marker[1]
        # A marker at which engines do not stop is better than nothing.
        for text in (next_text, *self._template.end_texts[:1]):
            if text in self._template.end_texts:
                return text
        if not next_text:
            raise TextError(
                f"[{turn}]: the template ends no turn by a special token, and the tokenizer has no "
                "EOS token, so that no model could learn to stop; set eos_token in its folder"
            )
        return next_text


_ANSWER = "An answer."
_EXAMPLE: list[Message] = [
    {"role": "user", "content": "A question?"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "Another question?"},
]
_RESULT: Message = {"role": "tool", "content": "A result."}


def _difference(one: str, other: str) -> str:
    """A few characters of two texts from where they differ."""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    first = sum(1 for _ in shared)
    return f"{one[first : first + _SHOWN]!r} there and {other[first : first + _SHOWN]!r} here"
