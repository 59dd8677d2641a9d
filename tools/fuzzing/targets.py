"""Fuzz targets: functions that accept any input, and the properties that must hold for it.

Each returns whether the input was accepted. Inputs may be refused with a documented one-line error;
any other exception is a finding. `tests/property/test_fuzz_targets.py` runs them under hypothesis.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np

from megapack import (
    ConfigError,
    DataError,
    MegapackError,
    Plan,
    PlanError,
    check_plan,
    simulate,
)
from megapack.base.choices import AdvantageNorm
from megapack.config import dump_yaml, parse_config
from megapack.job.config.sections import ModelConfig, TrainConfig
from megapack.job.data.advantages import group_advantages
from megapack.job.data.chats import ChatTemplate, ChatText, chat_texts
from megapack.job.data.dataset import Dataset
from megapack.job.data.lengths import Columns, read_length_file
from megapack.job.data.lines import BadLine, LineParser
from megapack.job.data.rollouts import group_batches
from megapack.job.data.template_server import write_chat
from megapack.job.data.templates import TemplateSource
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer, Chat, ChatTokens, Message
from megapack.plan.show import diff_plans
from tests import chat_templates
from tools.fuzzing import seeds

T = TypeVar("T")

Integer = Callable[[int, int], int]
"""Draws an integer between the two arguments, both included."""

# A mutated plan can claim any number of samples; larger plans are not checked against lengths.
_MAX_CHECKED_SAMPLES = 1000
_MEMORY_FOLDER = Path("/dev/shm")


class Finding(Exception):
    """A documented property does not hold."""


def require(good: bool, what: str) -> None:
    """Raise a finding with this message unless `good`."""
    if not good:
        raise Finding(what)


def refused(call: Callable[[], T], *documented: type[MegapackError]) -> T | None:
    """The call's result, or None if it raises a documented error of one line."""
    try:
        return call()
    except documented as error:
        if len(str(error).splitlines()) != 1:
            raise Finding(f"not one line: {str(error)!r:.200}") from error
        return None


def hold_plan_json(data: bytes) -> bool:
    """`Plan.from_json` on any text."""
    text = data.decode("utf-8", "surrogateescape")
    return _hold_plan(refused(lambda: Plan.from_json(text), PlanError))


def _hold_plan(plan: Plan | None) -> bool:
    if plan is None:
        return False
    _hold_round_trips(plan)
    require(not diff_plans(plan, plan), "a plan differs from itself")
    for step in plan.steps:
        refused(lambda: simulate(step, layout=plan.layout), ConfigError, PlanError)  # noqa: B023
    if plan.num_samples <= _MAX_CHECKED_SAMPLES:
        lengths = [seeds.seed_length(sample) for sample in range(plan.num_samples)]
        refused(lambda: check_plan(plan, lengths), PlanError, DataError)
    return True


def _hold_round_trips(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    require(again == plan, "a different plan comes back")
    require(again.to_json() == plan.to_json(), "different JSON comes back")
    require(str(again) == str(plan), "a different text comes back")


def hold_config(data: bytes) -> bool:
    """`parse_config` of the main job; overrides follow the text, each after a NUL byte."""
    text, *overrides = data.decode("utf-8", "surrogateescape").split("\0")
    config = refused(lambda: parse_config(text, overrides, TrainConfig), ConfigError)
    if config is None:
        return False
    require(parse_config(dump_yaml(config), [], TrainConfig) == config, "dump_yaml loses something")
    refused(lambda: config.layout.to_layout(8, config.model.fp8_rows), ConfigError)
    return True


def hold_hf_config(data: bytes) -> bool:
    """A Hugging Face folder's config.json: its lines, or KEY=VALUE pieces after NUL bytes."""
    text, *pieces = data.split(b"\0")
    for piece in pieces:
        key, _, value = piece.partition(b"=")
        text += b'%s"%s": %s' % (b", " if text else b"{", key, value or b"null")
    with tempfile.TemporaryDirectory(
        dir=_MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
    ) as name:
        Path(name, "config.json").write_bytes(text + (b"}" if pieces else b""))
        return refused(lambda: ModelConfig.from_hf(name), ConfigError) is not None


def tokens_of(tokenizer: ByteTokenizer, chat: ChatText) -> ChatTokens:
    """A chat as bytes."""
    ids = tokenizer.encode_prompt(chat.text)[1:]
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, stop in chat.spans:
        before, own = chat.text[:start].encode(), chat.text[start:stop].encode()
        mask[len(before) :][: len(own)] = True
    return ChatTokens(ids, mask, chat.num_messages)


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template that, like Qwen3's, shortens the turns before the user's last."""

    def encode_chat(self, chat: Chat) -> list[ChatTokens]:
        """See `Tokenizer`."""
        template = ChatTemplate(self._write, False, ("|",), ("|",))
        texts = chat_texts(chat.messages, template, chat.turns)
        return [tokens_of(self, text) for text in texts]

    def _write(self, messages: Sequence[Message], asks: bool) -> ChatText:
        last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=0)
        texts = [str(one.get("content"))[0 if i > last else 1 :] for i, one in enumerate(messages)]
        turns = (f"{one['role']}:{text}|\n" for one, text in zip(messages, texts, strict=True))
        return ChatText("".join(turns) + ("assistant:" if asks else ""), [])


class WrittenBytes(ByteTokenizer):
    """Bytes with a chat template in the manner of a published one; checks what it marks."""

    def __init__(self, template: str, specials: str) -> None:
        texts = tuple(specials.split())
        self._source = TemplateSource(template, {"eos_token": texts[0]}, texts, texts[:1])

    def encode_chat(self, chat: Chat) -> list[ChatTokens]:
        """See `Tokenizer`."""
        written = write_chat(self._source, chat)
        spans = [one.text[start:stop] for one in written for start, stop in one.spans]
        require(len(spans) == len(chat.turns), "a turn that counts has no text, or another one has")
        for turn, text in zip(chat.turns, spans, strict=True):
            content = chat.messages[turn].get("content") or ""
            require(content in text, f"turn {turn} is not trained as it is")
            require(text.endswith(self._source.special_texts), f"nothing ends turn {turn}")
        return [tokens_of(self, one) for one in written]


CHAT_TOKENIZERS = tuple(
    WrittenBytes(template, specials)
    for template, specials in (
        (chat_templates.CHATML, "<|im_end|> <|im_start|>"),
        (chat_templates.GLM, f"<|endoftext|> {chat_templates.GLM_SPECIALS}"),
        (chat_templates.MARKED_PHI3, f"<|endoftext|> {chat_templates.PHI_SPECIALS}"),
        (chat_templates.DEEPSEEK, "<eos> <User> <Assistant> <Output> <Call>"),
    )
)


def hold_chats(data: bytes) -> bool:
    """A line of chats under templates of several manners."""
    tokenizer = CHAT_TOKENIZERS[zlib.crc32(data) % len(CHAT_TOKENIZERS)]
    try:
        samples = LineParser(tokenizer, 10**6).parse(data, "own")
    except BadLine as error:
        require(len(str(error).splitlines()) == 1, f"not one line: {str(error)!r:.200}")
        return False
    require(all(sample.num_loss_tokens for sample in samples), "a sample trains nothing")
    return True


READ_SETTINGS = (
    ReadSettings(tokenizer=ChatBytes()),
    ReadSettings(tokenizer=ChatBytes(), vocab_size=300, max_length=6, overlong="truncate"),
    ReadSettings(tokenizer=ChatBytes(), vocab_size=100, max_length=4, overlong="skip"),
)


def hold_rollouts(data: bytes) -> bool:
    """The readers of rollouts and of lengths."""
    settings = READ_SETTINGS[zlib.crc32(data) % len(READ_SETTINGS)]
    with tempfile.TemporaryDirectory(
        dir=_MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
    ) as name:
        path = Path(name) / "data.jsonl"
        path.write_bytes(data)
        as_lengths = refused(lambda: read_length_file(str(path), Columns()), DataError)
        return _hold_rollouts(path, settings) or as_lengths is not None


def _hold_rollouts(path: Path, settings: ReadSettings) -> bool:
    dataset = refused(lambda: Dataset.from_files(path, settings, path.parent), DataError)
    if dataset is None:
        return False
    rows = np.arange(len(dataset))
    counts = zip(dataset.prompt_tokens(rows), dataset.response_tokens(rows), strict=True)
    for row, count in enumerate(counts):
        tokens = dataset.tokens(row)
        lengths = (len(tokens.prompt_ids), len(tokens.response_ids))
        require(lengths == count, f"sample {row} differs in length from its index")
        mask = tokens.loss_mask
        counting = np.ones(lengths[1], dtype=np.bool_) if mask is None else mask
        own = int(counting[0 if lengths[0] else 1 :].sum())
        require(own == dataset.loss_tokens(rows)[row], f"sample {row} differs in its loss tokens")
    signs = np.array(dataset.pair_signs(rows))
    of_rollout = np.array(dataset.rollout_ids(rows))
    for rollout in set(of_rollout[signs != 0].tolist()):
        require(signs[of_rollout == rollout].sum() == 0, "a pair lacks one of its samples")
    rewards = dataset.rewards(rows)
    for mode in get_args(AdvantageNorm):
        found = refused(lambda: group_advantages(rewards, mode), DataError)  # noqa: B023
        require(found is None or bool(np.isfinite(found).all()), "advantages are not finite")
    batches = list(
        group_batches(
            dataset.index["group"], 2, shuffle=True, seed=1, work=dataset.lengths, window=2
        )
    )
    require(sorted(np.concatenate(batches)) == list(rows), "batches lose samples")
    return True


@dataclass(frozen=True)
class Documents:
    """A target that reads documents."""

    hold: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    """Valid documents from which mutation starts."""


DOCUMENTS = {
    "plan_json": Documents(hold_plan_json, seeds.plan_json),
    "config": Documents(hold_config, seeds.configs),
    "hf_config": Documents(hold_hf_config, seeds.hf_configs),
    "rollouts": Documents(hold_rollouts, seeds.rollouts),
    "chats": Documents(hold_chats, seeds.chats),
}
