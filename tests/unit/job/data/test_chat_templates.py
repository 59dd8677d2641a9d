"""Chats under templates in the manner of published ones: what counts, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megapack.errors import ConfigError
from megapack.job.data.batches import read_settings
from megapack.job.data.dataset import Dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.lines import BadLine, LineParser
from megapack.job.data.token_blocks import ReadSettings

pytest.importorskip("transformers")
from tests.chat_templates import (
    CHATML,
    DEEPSEEK,
    GEMMA,
    GLM,
    GLM_SPECIALS,
    LLAMA3,
    MARKED_GLM,
    MARKED_PHI3,
    MISTRAL,
    PHI3,
    PHI_SPECIALS,
    QWEN3,
    TEXT_ALONE,
)
from tests.hf_models import make_tokenizer

pytestmark = pytest.mark.unit

Q1, Q2 = ({"role": "user", "content": text} for text in ("q1", "q2"))
A1, A2, B2 = ({"role": "assistant", "content": text} for text in ("a1", "a2", "b2"))
TWO = [Q1, A1, Q2, A2]


def make(
    folder: Path, template: str, specials: str, eos: str | None, stops: tuple[str, ...] = ()
) -> HfTokenizer:
    """A tokenizer with these special tokens, and the folder's tokens at which engines stop."""
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": specials.split()})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if stops:
        ids = tokenizer.convert_tokens_to_ids(list(stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return HfTokenizer(folder)


def masked(tokenizer: HfTokenizer, row: Mapping[str, Any]) -> list[str]:
    """The texts of a line's samples; what counts is in brackets."""
    found = []
    for sample in LineParser(tokenizer, 10**6).parse(json.dumps(row).encode() + b"\n", "x"):
        num_response = len(sample.response_ids)
        mask = [1] * num_response if sample.loss_mask is None else sample.loss_mask.tolist()
        ids = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
        counts = [0] * len(sample.prompt_ids) + mask
        texts = zip(tokenizer.token_texts(ids), counts, strict=True)
        found.append("".join(f"⟦{text}⟧" if on else text for text, on in texts).replace("⟧⟦", ""))
    return found


def refused(tokenizer: HfTokenizer, row: Mapping[str, Any]) -> str:
    with pytest.raises(BadLine) as caught:
        masked(tokenizer, row)
    assert "\n" not in str(caught.value)
    return str(caught.value)


GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
IM = "<|im_start|>"
USER = f"{IM}user\n"
# Template, special tokens, EOS, stops, and the samples of TWO.
ENDINGS: list[tuple[str, str, str, tuple[str, ...], list[str]]] = [
    (
        *(CHATML, "", "<|im_end|>", ()),
        [
            f"{USER}q1<|im_end|>\n{IM}assistant\n⟦a1<|im_end|>⟧\n"
            f"{USER}q2<|im_end|>\n{IM}assistant\n⟦a2<|im_end|>⟧\n"
        ],
    ),
    # A base model: its EOS is another one than the template's.
    (
        *(CHATML, "", "<|endoftext|>", ()),
        [
            f"{USER}q1<|im_end|>\n{IM}assistant\n⟦a1<|im_end|>⟧\n"
            f"{USER}q2<|im_end|>\n{IM}assistant\n⟦a2<|im_end|>⟧\n"
        ],
    ),
    (
        *(GLM, GLM_SPECIALS, "<|endoftext|>", GLM_STOPS),
        ["[gMASK]<sop><|user|>\nq1<|assistant|>\n⟦a1<|user|>⟧\nq2<|assistant|>\n⟦a2<|user|>⟧"],
    ),
    # No config says where engines stop.
    (
        *(GLM, GLM_SPECIALS, "<|endoftext|>", ()),
        ["[gMASK]<sop><|user|>\nq1<|assistant|>\n⟦a1<|user|>⟧\nq2<|assistant|>\n⟦a2<|endoftext|>⟧"],
    ),
    (
        *(MARKED_GLM, GLM_SPECIALS, "<|endoftext|>", GLM_STOPS),
        ["[gMASK]<sop><|user|>\nq1<|assistant|>\n⟦a1<|user|>⟧\nq2<|assistant|>\n⟦a2<|user|>⟧"],
    ),
    (
        *(LLAMA3, "<|bos|> <|start_header|> <|end_header|> <|eot|>", "<|eot|>", ()),
        [
            "<|bos|><|start_header|>user<|end_header|>\n\nq1<|eot|>"
            "<|start_header|>assistant<|end_header|>\n\n⟦a1<|eot|>⟧"
            "<|start_header|>user<|end_header|>\n\nq2<|eot|>"
            "<|start_header|>assistant<|end_header|>\n\n⟦a2<|eot|>⟧"
        ],
    ),
    (
        *(PHI3, PHI_SPECIALS, "<|endoftext|>", ()),
        [
            "<|user|>\nq1<|end|>\n<|assistant|>\n⟦a1<|end|>\n<|endoftext|>⟧",
            "<|user|>\nq1<|end|>\n<|assistant|>\na1<|end|>\n"
            "<|user|>\nq2<|end|>\n<|assistant|>\n⟦a2<|end|>\n<|endoftext|>⟧",
        ],
    ),
    # The marks leave out the token that ends a turn.
    (
        *(MARKED_PHI3, PHI_SPECIALS, "<|endoftext|>", ()),
        [
            "<|user|>\nq1<|end|>\n<|assistant|>\n⟦a1<|end|>⟧\n<|endoftext|>",
            "<|user|>\nq1<|end|>\n<|assistant|>\na1<|end|>\n"
            "<|user|>\nq2<|end|>\n<|assistant|>\n⟦a2<|end|>⟧\n<|endoftext|>",
        ],
    ),
    (
        *(MISTRAL, "<s> </s> [INST] [/INST]", "</s>", ()),
        ["<s>[INST] q1 [/INST]⟦ a1</s>⟧[INST] q2 [/INST]⟦ a2</s>⟧"],
    ),
    (
        *(GEMMA, "<bos> <start_of_turn> <end_of_turn> <eos>", "<eos>", ("<eos>", "<end_of_turn>")),
        [
            "<bos><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n⟦a1<end_of_turn>⟧\n"
            "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n⟦a2<end_of_turn>⟧\n"
        ],
    ),
    (
        *(DEEPSEEK, "<User> <Assistant> <Output> <eos>", "<eos>", ()),
        ["<User>q1<Assistant>⟦a1<eos>⟧<User>q2<Assistant>⟦a2<eos>⟧"],
    ),
]


@pytest.mark.parametrize(
    ("template", "specials", "eos", "stops", "samples"), ENDINGS, ids=range(len(ENDINGS))
)
def test_the_token_that_ends_a_turn_counts(
    template: str,
    specials: str,
    eos: str,
    stops: tuple[str, ...],
    samples: list[str],
    tmp_path: Path,
) -> None:
    tokenizer = make(tmp_path, template, specials, eos, stops)
    assert masked(tokenizer, {"messages": TWO}) == samples
    before, _, answer = samples[-1].rpartition("⟦")
    chosen = before.replace("⟦", "").replace("⟧", "") + "⟦" + answer
    pair = {"prompt": TWO[:3], "chosen": [A2], "rejected": [B2]}
    assert masked(tokenizer, pair) == [chosen, chosen.replace("a2", "b2")]
    # A turn that does not count is context, with its end.
    (last,) = masked(tokenizer, {"messages": [Q1, {**A1, "weight": 0}, Q2, A2]})
    assert last == chosen
    # A cut sample has no other end.
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": TWO}) + "\n")
    whole = LineParser(tokenizer, 10**6).parse(path.read_bytes(), "x")[-1]
    most = whole.num_tokens - 1
    cut = ReadSettings(tokenizer=tokenizer, max_length=most, overlong="truncate")
    data = Dataset.from_files(path, cut, tmp_path)
    tokens = data.tokens(len(data) - 1)
    ids = [*whole.prompt_ids.tolist(), *whole.response_ids.tolist()]
    assert [*tokens.prompt_ids.tolist(), *tokens.response_ids.tolist()] == ids[:most]


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "r"}


def test_a_call_ends_where_the_tool_answers(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, GLM, GLM_SPECIALS, "<|endoftext|>", GLM_STOPS)
    thought = {**A1, "reasoning": "so"}
    written = "<tool_call>f<arg>x=é</arg></tool_call><|observation|>⟧"
    begin = "[gMASK]<sop><|user|>\nq1<|assistant|>\n⟦"
    found = masked(tokenizer, {"messages": [Q1, CALLS, RESULT, thought, Q2, A2]})
    assert [text.replace("Ã©", "é") for text in found] == [
        f"{begin}{written}\nr<|assistant|>\n⟦<think>so</think>a1<|user|>⟧",
        f"{begin[:-1]}{written[:-1]}\nr<|assistant|>\na1<|user|>\nq2<|assistant|>\n⟦a2<|user|>⟧",
    ]
    found = masked(tokenizer, {"messages": [Q1, CALLS]})
    assert [text.replace("Ã©", "é") for text in found] == [begin + written]


def test_an_unknown_end_is_refused(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "eos", TEXT_ALONE, "", "<|endoftext|>")
    assert masked(tokenizer, {"messages": TWO[:2]}) == ["user: q1\nassistant:⟦ a1\n<|endoftext|>⟧"]
    assert refused(tokenizer, {"messages": TWO}) == (
        "messages [1]: no special token ends this turn, 'user: q2\\nassista' follows it, so that "
        "no model could learn to stop; give a template that writes one"
    )
    tokenizer = make(tmp_path / "none", TEXT_ALONE, "", None)
    assert "the tokenizer has no EOS token" in refused(tokenizer, {"messages": TWO[:2]})


FLAGS = [("weight", 0.0, 1.0), ("loss_mask", 0, 1), ("train", False, True)]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return make(tmp_path_factory.mktemp("chatml"), CHATML, "", "<|im_end|>")


@pytest.mark.parametrize(("key", "off", "on"), FLAGS)
def test_messages_say_whether_they_count(
    key: str, off: Any, on: Any, chatml: HfTokenizer, tmp_path: Path
) -> None:
    row = {"messages": [Q1, {**A1, key: off}, Q2, {**A2, key: on}]}
    (found,) = masked(chatml, row)
    assert found == masked(chatml, {"messages": TWO})[0].replace("⟦a1<|im_end|>⟧", "a1<|im_end|>")
    assert refused(chatml, {"messages": [Q1, {**A1, key: off}]}) == (
        "messages has no turn that counts, so that no token counts; leave it out"
    )
    side = {"prompt": "q1", "chosen": [A1], "rejected": [{**A2, key: off}]}
    assert "rejected has no turn that counts" in refused(chatml, side)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # Parquet gives null to the messages that do not say it.
    rows = [row, {"messages": TWO}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    settings = ReadSettings(tokenizer=chatml)
    data = Dataset.from_files(tmp_path / "data.parquet", settings, tmp_path)
    assert [data.loss_tokens([number]) for number in (0, 1)] == [[3], [6]]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({**A1, "weight": 0.5}, "messages[1].weight is 0.5, expected 0 or 1, or true or false"),
        ({**A1, "weight": "0"}, 'messages[1].weight is "0", expected 0 or 1'),
        ({**A1, "loss_mask": [1, 0]}, "messages[1].loss_mask is [1, 0], expected 0 or 1"),
        ({**A1, "weight": 0, "train": True}, "counts by train, and not by weight; give one"),
        ({**A1, "train_detail": [{}]}, "has train_detail, which is not read; a turn counts as"),
        ({**A1, "mask": 0}, "has mask, which is not read; say by weight"),
        ({**A1, "prefix": True}, "has prefix, which is not read"),
        ({**Q2, "train": True}, 'counts by train, but is of role "user": only the assistant'),
        ({**A1, "reasoning": "a", "thinking": "b"}, "has other text in thinking and reasoning"),
        ({**A1, "reasoning": 1}, "messages[1].reasoning is 1, expected a string"),
        ({**A1, "reasoning": "a"}, "has reasoning_content of role assistant, which the chat temp"),
        ({**A1, "function_call": {"name": "f"}}, "has function_call of role assistant, which the"),
        ({**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}, "arguments is 1"),
    ],
    ids=range(13),
)
def test_messages_that_cannot_be_read_are_refused(
    message: Any, says: str, chatml: HfTokenizer
) -> None:
    assert says in refused(chatml, {"messages": [Q1, message]})


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"weight": 0}, "has weight, which is not read; all samples count alike"),
        ({"loss_mask": [1]}, "has loss_mask, which is per token id"),
        ({"functions": [{"name": "f"}]}, "has functions, which is not read; give tools"),
        ({"enable_thinking": False}, "has enable_thinking, which is not read; give arguments of"),
        ({"system": "s"}, "has system, which is not read; give it in messages"),
        ({"images": ["a.png"]}, "has images, which are not read; set model.vision to frozen"),
        ({"videos": ["a.mp4"]}, "has videos, which is not read; only text and images are trained"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is [1], expected an object"),
        ({"chat_template_kwargs": {"a": 1}}, "has the template argument a, but the chat template"),
        ({"chat_template_kwargs": {"messages": []}}, "has the template argument messages, but"),
        ({"tools": [CALL]}, "has tools with names, which the chat template does not write"),
    ],
    ids=range(11),
)
def test_columns_that_would_change_what_is_trained_are_refused(
    extra: dict[str, Any], says: str, chatml: HfTokenizer
) -> None:
    assert says in refused(chatml, {"messages": TWO, **extra})
    if "tools" in extra or "weight" in extra:
        key = next(iter(extra))
        assert f"has {key}, which" in refused(chatml, {"prompt": "a", "response": "b", **extra})
    # Empty lists say nothing.
    assert masked(chatml, {"messages": TWO, "images": [], "chat_template_kwargs": {}})


def test_calls_are_written_as_the_template_needs_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    arguments = {"x": 1, "y": "é"}
    text = '{"x":1, "y": "é"}'
    openai = {"type": "function", "function": {"name": "f", "arguments": text}}
    mapping = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    bare = {"name": "f", "arguments": arguments}
    written = json.dumps(arguments, ensure_ascii=False)
    twice = CHATML.replace("arguments | tojson", "arguments")
    for number, (template, specials, eos, expected) in enumerate(
        (
            (CHATML, "", "<|im_end|>", {written}),
            (DEEPSEEK, "<User> <Assistant> <Output> <Call> <eos>", "<eos>", {written, text}),
            # An object would be written as Python writes it.
            (twice, "", "<|im_end|>", {written, text}),
        )
    ):
        tokenizer = make(tmp_path / str(number), template, specials, eos)
        reference = AutoTokenizer.from_pretrained(tmp_path / str(number))
        for call in (openai, mapping, bare):
            chat = [Q1, {**CALLS, "tool_calls": [call]}]
            (sample,) = LineParser(tokenizer, 10**6).parse(
                json.dumps({"messages": chat}).encode(), "x"
            )
            found = reference.decode([*sample.prompt_ids, *sample.response_ids])
            of_call = text if call is openai and text in expected else written
            assert of_call in found
            if call is not bare:
                given = {**call, "function": {"name": "f", "arguments": arguments}}
                if len(expected) == 2:
                    given["function"]["arguments"] = of_call
                chat = [Q1, {**CALLS, "tool_calls": [given]}]
                assert found == reference.apply_chat_template(chat, tokenize=False)


def test_what_a_template_does_not_write_is_refused(tmp_path: Path) -> None:
    specials = "<|bos|> <|start_header|> <|end_header|> <|eot|>"
    tokenizer = make(tmp_path / "llama", LLAMA3, specials, "<|eot|>")
    assert masked(tokenizer, {"messages": [Q1, {**CALLS, "content": None}]})
    # Text beside a call is left out.
    says = "has content of role assistant, which the chat template does not write; leave it out"
    assert says in refused(tokenizer, {"messages": [Q1, {**CALLS, "content": "look"}]})
    # Names and ids that no template needs are not looked for.
    assert masked(tokenizer, {"messages": [{**Q1, "name": "n", "id": 7}, A1], "note": "n"})
    names_alone = CHATML.replace("{{ c.function.arguments | tojson }}", "")
    tokenizer = make(tmp_path / "names", names_alone, "", "<|im_end|>")
    assert "has tool_calls with arguments" in refused(tokenizer, {"messages": [Q1, CALLS]})
    no_arguments = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert masked(tokenizer, {"messages": [Q1, {**CALLS, "tool_calls": [no_arguments]}]})
    no_thoughts = CHATML.replace("(m.content or '')", "m.content.split('</think>')[-1]")
    tokenizer = make(tmp_path / "thoughts", no_thoughts, "", "<|im_end|>")
    thinks = {**A1, "content": "<think>so</think>a1"}
    assert "has text before </think>" in refused(tokenizer, {"messages": [Q1, thinks]})


def test_template_arguments_are_given_by_config_and_line(tmp_path: Path) -> None:
    from megapack.config import parse_config
    from megapack.job.config.sections import TrainConfig

    make(tmp_path / "model", QWEN3, "", "<|im_end|>")
    text = (
        f"name: a\ndata: {{path: x.jsonl, tokenizer_path: {tmp_path / 'model'}}}\n"
        "plan: {max_tokens_per_gpu: 64}\nmodel: {vocab_size: 320}"
    )
    off = "data.chat_template_kwargs={enable_thinking: false}"
    plain, without = (
        read_settings(parse_config(text, overrides, TrainConfig)).tokenizer
        for overrides in ([], [off])
    )
    assert isinstance(plain, HfTokenizer)
    assert isinstance(without, HfTokenizer)
    assert plain.digest != without.digest
    thinks = {**A1, "reasoning_content": "so"}
    (found,) = masked(plain, {"messages": [Q1, thinks]})
    assert found == f"{USER}q1<|im_end|>\n{IM}assistant\n⟦<think>so</think>a1<|im_end|>⟧\n"
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    assert masked(without, {"messages": [Q1, thinks], **on}) == [found]
    # The generation prompt has an end of thinking that the turn has not.
    says = "does not write this turn after its generation prompt, '<think></think>' there"
    assert says in refused(without, {"messages": [Q1, A1]})
    as_text = {"chat_template_kwargs": json.dumps({"enable_thinking": False})}
    assert says in refused(plain, {"messages": [Q1, A1], **as_text})
    with pytest.raises(ConfigError, match=r"no effect under data\.tokenizer=bytes"):
        parse_config("name: a\ndata: {path: x, tokenizer: bytes}", [off], TrainConfig)
    for wrong in ("3", "{a: [1]}", "[a]"):
        with pytest.raises(ConfigError, match="chat_template_kwargs"):
            parse_config(text, [f"data.chat_template_kwargs={wrong}"], TrainConfig)


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}OUT{% endfor %}{% endfor %}"
HOSTILE = [
    ("{% if messages[0].content == 'q1' %}" + NESTED.replace("OUT", "") + "{% endif %}", "5 s"),
    (NESTED.replace("OUT", "a" * 999), "more than 67108864 characters"),
    ("{{ 'a' * 10**10 }}", "more than 2 GiB"),
    ("{{ messages[0].content.ljust(10**10) }}", "more than 2 GiB"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth"),
    ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    ("{% if %}", "refused by the chat template"),
]


@pytest.mark.parametrize(("program", "says"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_templates_end_with_one_line(program: str, says: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "hostile", program + CHATML, "", "<|im_end|>")
    begin = time.monotonic()
    assert says in refused(tokenizer, {"messages": TWO})
    assert time.monotonic() - begin < 60
    # The next template is not the worse for it.
    (tmp_path / "hostile" / "chat_template.jinja").write_text(CHATML)
    assert masked(HfTokenizer(tmp_path / "hostile"), {"messages": TWO})
