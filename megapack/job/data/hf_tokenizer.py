"""The tokenizer of a Hugging Face folder: `tokenizer.json` and its chat template.

It is read by transformers, but for the model-specific classes, which need torch: the ids are those
of `tokenizer.json`. Nothing is imported before a text is encoded; a run whose samples are stored
already never imports it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megapack.base.files import misplaced
from megapack.config.shipped import download_hint
from megapack.errors import ConfigError, first_line
from megapack.job.data.chats import ChatText
from megapack.job.data.templates import TemplateSource, template_texts
from megapack.job.data.tokenizer import Chat, ChatTokens, Ids, TextError

_MAIN_FILE = "tokenizer.json"
# What decides ids and chats, in the folder and in `additional_chat_templates`.
_FILES = (
    *(_MAIN_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
# Part of the digest. Increase it when the same chat gets other ids, or others of them count.
_FORMAT = 2
# Where a folder names the tokens at which an engine stops.
_CONFIGS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class HfTokenizer:
    """See `tokenizer.Tokenizer`. A prompt begins with the special tokens that the tokenizer puts
    before texts, a response ends with the EOS token; a text that has them already gets no second.

    Args:
        folder: a model's folder, or that of a tokenizer alone.
        template_arguments: of the chat template, by name; those of a line come before them.

    Raises:
        ConfigError: the folder has no `tokenizer.json`.
    """

    folder: Path
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.folder / _MAIN_FILE).is_file():
            raise ConfigError(
                f"{self.folder} has no {_MAIN_FILE}{download_hint(self.folder)}; set "
                "data.tokenizer_path to a folder that has, save the tokenizer once with "
                "transformers' save_pretrained, or set data.tokenizer=bytes for data of token ids"
            )

    def __reduce__(self) -> tuple[type[HfTokenizer], tuple[Path, Mapping[str, Any]]]:
        # Without what has been loaded: another process loads it again.
        return HfTokenizer, (self.folder, self.template_arguments)

    @property
    def digest(self) -> str:
        """See `Tokenizer`: of the files' names and contents as they are now, the packages'
        versions, and of what else decides chats."""
        versions = package_versions()
        rest = (_FORMAT, versions, self._stop_ids, sorted(self.template_arguments.items()))
        digest = hashlib.sha256(repr(rest).encode())
        for path in sorted(path for pattern in _FILES for path in self.folder.glob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
        return f"hf {digest.hexdigest()}"

    @functools.cached_property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return 1 + int(max(self._loaded.get_vocab().values()))

    def encode_prompt(self, text: str) -> Ids:
        """See `Tokenizer`."""
        ids = self._encode(text)
        _, prefix = self._encoder
        if np.array_equal(ids[: len(prefix)], prefix):
            return ids
        return np.concatenate([prefix, ids])

    def encode_response(self, text: str) -> Ids:
        """See `Tokenizer`."""
        eos = self._loaded.eos_token_id
        if eos is None:
            raise TextError(
                f"must end with an EOS token, but the tokenizer of {self.folder} has none"
            )
        ids = self._encode(text)
        return ids if ids[-1:].tolist() == [eos] else np.concatenate([ids, np.array([eos])])

    def encode_chat(self, chat: Chat) -> list[ChatTokens]:
        """See `Tokenizer`."""
        chat = replace(chat, arguments={**self.template_arguments, **chat.arguments})
        texts = template_texts(self._template(chat.tools is not None), chat)
        return list(map(self._chat_tokens, texts))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """See `Tokenizer`; a token that is a part of a character as the tokenizer names it."""
        texts = [self._backend.decode([i], skip_special_tokens=False) for i in map(int, ids)]
        names = (self._backend.id_to_token(int(i)) or f"<{i}>" for i in ids)
        return [
            name if not text or "\ufffd" in text else text
            for text, name in zip(texts, names, strict=True)
        ]

    @functools.cached_property
    def _loaded(self) -> Any:
        try:
            from transformers import PreTrainedTokenizerFast, logging
        except ImportError:
            raise ConfigError(
                "data.tokenizer=hf needs transformers; pip install transformers"
            ) from None
        # It warns that the folder names a model-specific class.
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the libraries raise what they like for a damaged file
            raise ConfigError(
                f"{self.folder}: the tokenizer cannot be read ({first_line(error)}"
                f"{misplaced(self.folder / _MAIN_FILE)}); set data.tokenizer_path"
            ) from None
        finally:
            logging.set_verbosity(verbosity)
        loaded.backend_tokenizer.no_truncation()
        loaded.backend_tokenizer.no_padding()
        return loaded

    @functools.cached_property
    def _stop_ids(self) -> list[int]:
        """Ids of the tokens at which an engine stops, as the folder's configs name them."""
        found = []
        for name in _CONFIGS:
            path = self.folder / name
            try:
                config = json.loads(path.read_bytes()) if path.is_file() else {}
                for part in (config, config.get("text_config") or {}):
                    ids = part.get("eos_token_id")
                    found += [ids] if isinstance(ids, int) else [*map(int, ids or ())]
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}: eos_token_id cannot be read ({first_line(error)}); correct the file"
                ) from None
        return list(dict.fromkeys(found))

    @functools.cached_property
    def _templates(self) -> dict[bool, TemplateSource]:
        return {}

    def _template(self, has_tools: bool) -> TemplateSource:
        """The chat template of chats with or without tools."""
        if has_tools in self._templates:
            return self._templates[has_tools]
        loaded = self._loaded
        try:
            text: str = loaded.get_chat_template(tools=[{}] if has_tools else None)
        except ValueError:
            raise TextError(
                f"needs a chat template, the tokenizer of {self.folder} has none; set "
                "data.tokenizer_path to a folder with one"
            ) from None
        added = loaded.added_tokens_decoder
        specials = (*loaded.all_special_tokens, *(t.content for t in added.values() if t.special))
        stops = (added[i].content for i in self._stop_ids if i in added)
        ends = (*([loaded.eos_token] if loaded.eos_token else ()), *stops)
        source = TemplateSource(text, loaded.special_tokens_map, specials, ends)
        return self._templates.setdefault(has_tools, source)

    @functools.cached_property
    def _encoder(self) -> tuple[Any, Ids]:
        """The tokenizer without its post-processor, and the special tokens that this put first.

        Those are none, BOS, or several. It adds nothing to what is encoded here, but byte-level
        ones cut white space off a token's offsets: all of "\n\n", which then would be of no text.
        """
        backend = self._loaded.backend_tokenizer
        encoding = backend.encode("x", add_special_tokens=True)
        added = itertools.takewhile(
            lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        )
        prefix = np.array([token for token, _ in added], dtype=np.int64)
        backend.post_processor = None
        return backend, prefix

    @property
    def _backend(self) -> Any:
        return self._encoder[0]

    def _encode(self, text: str) -> Ids:
        return np.array(self._encoding(text).ids, dtype=np.int64)

    def _encoding(self, text: str) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise TextError("has half of a surrogate pair; write it again") from None

    def _chat_tokens(self, chat: ChatText) -> ChatTokens:
        encoding = self._encoding(chat.text)
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=np.bool_)
        for first, end in chat.spans:
            # A token counts if a part of its text does, and so does what lies between two that do.
            touched = np.flatnonzero((starts < end) & (stops > first) & (stops > starts))
            if touched.size:
                mask[touched[0] : touched[-1] + 1] = True
        return ChatTokens(np.array(encoding.ids, dtype=np.int64), mask, chat.num_messages)


@functools.cache
def package_versions() -> list[str]:
    """The versions of the packages that make ids of text; they are not imported."""
    found = []
    for name in ("transformers", "tokenizers", "jinja2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found
