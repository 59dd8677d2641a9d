"""Chat templates run in a process of their own, with limits of time and memory.

A template is a program that came with a model: it may loop without end or fill the memory, and no
signal ends one multiplication of large numbers. `template_texts` sends chats to a process that
runs `template_server.serve`, and gets their texts. The process starts with the first chat, in less
than a second.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapack.errors import ConfigError
from megapack.job.data.chats import ChatText
from megapack.job.data.processes import AnsweringProcess, ProcessEnded
from megapack.job.data.tokenizer import Chat, TextError

MAX_SECONDS = 5
"""CPU time of one rendering. A thousand turns take a tenth of it."""


@dataclass(frozen=True)
class TemplateSource:
    """A template with what its tokenizer gives it."""

    text: str
    specials: Mapping[str, Any]
    """Special tokens by the names that templates read."""
    special_texts: tuple[str, ...]
    """See `chats.ChatTemplate`."""
    end_texts: tuple[str, ...]
    """See `chats.ChatTemplate`."""


def template_texts(source: TemplateSource, chat: Chat) -> list[ChatText]:
    """The samples of a chat, see `chats.chat_texts`, from the process of templates.

    Raises:
        ConfigError: jinja2 is not installed.
        TextError: the template refuses the chat, leaves out a part of it, or needs more than the
            limits.
    """
    process = _process(os.getpid())
    try:
        process.send((source, chat))
        texts: list[ChatText] = process.receive()
    except ProcessEnded as ended:
        # The next chat starts another one.
        process.end()
        _process.cache_clear()
        raise TextError(_ending(ended.code)) from None
    return texts


def _ending(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"makes the chat template run for more than {MAX_SECONDS} s; correct the template"
    return f"ended the process of the chat template (exit code {code}); look at its output"


@functools.cache
def _process(process_id: int) -> AnsweringProcess:
    """The process for this one, whose id is given: a fork would share its pipes."""
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError("chat templates need jinja2; pip install jinja2")
    process = AnsweringProcess("from megapack.job.data.template_server import serve; serve()")
    atexit.register(process.end)
    return process
