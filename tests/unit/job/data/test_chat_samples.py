"""Texts and chats with a Hugging Face tokenizer: token ids, and what counts in the loss."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.errors import ConfigError, DataError
from megapack.job.data.dataset import Dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.index import index_key
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import Chat, ChatTokens, TextError

pytest.importorskip("transformers")
from tests.hf_models import PLAIN_TEMPLATE, TEMPLATE, make_tokenizer

pytestmark = pytest.mark.unit

# Like Qwen3's: what the assistant thought is left out of all turns before the user's last message.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
MARKED_THINKING = THINKING.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- content + '<|im_end|>\\n' }}{%- endif %}",
)

CHAT = [
    {"role": "system", "content": "answer"},
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "<think>so</think>a sentence é"},
    {"role": "user", "content": "the user asks"},
    {"role": "assistant", "content": "<think>oh</think>the tool"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it answers"},
    {"role": "user", "content": "thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def make(folder: Path, template: str = TEMPLATE) -> HfTokenizer:
    tokenizer = make_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return HfTokenizer(folder)


def by_transformers(folder: Path, messages: list[Any], **options: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


def trained(tokenizer: HfTokenizer, sample: ChatTokens) -> list[str]:
    """The texts of the runs of tokens that count."""
    runs: list[list[int]] = [[]]
    for token, counts in zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer._backend.decode(run, skip_special_tokens=False) for run in runs if run]


def encode(
    tokenizer: HfTokenizer, chat: list[Any], tools: list[Any] | None, first: int = 0
) -> list[ChatTokens]:
    """The samples of a chat of which all turns of the assistant from `first` on count."""
    turns = [i for i, one in enumerate(chat) if i >= first and one["role"] == "assistant"]
    return tokenizer.encode_chat(Chat(chat, tools, turns, {}))


TURNS = [CHAT[i]["content"] + "<|im_end|>" for i in (2, 4, 6)]


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_all_turns_of_the_assistant_count_in_one_sample(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template)
    (sample,) = encode(tokenizer, CHAT, None)
    # The last message is the user's: nothing in it would count.
    marked = template == TEMPLATE
    expected = by_transformers(tmp_path, CHAT[:-1], return_assistant_tokens_mask=marked)
    assert sample.ids.tolist() == expected["input_ids"]
    assert trained(tokenizer, sample) == TURNS
    if marked:
        assert sample.loss_mask.tolist() == [bool(x) for x in expected["assistant_masks"]]


@pytest.mark.parametrize("template", [THINKING, MARKED_THINKING])
def test_a_turn_that_is_rewritten_later_is_trained_as_it_was(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template)
    first, second = encode(tokenizer, CHAT, TOOLS)
    for sample, end in ((first, 3), (second, 7)):
        expected = by_transformers(tmp_path, CHAT[:end], tools=TOOLS)["input_ids"]
        assert sample.ids.tolist() == expected
    assert trained(tokenizer, first) == TURNS[:1]
    # No message of the user comes between them: both turns are in one sample, with their thoughts.
    assert trained(tokenizer, second) == TURNS[1:]


def test_templates_that_would_train_nothing_or_the_wrong_text_are_refused(tmp_path: Path) -> None:
    unmarked = TEMPLATE.replace(
        "message.role == 'assistant' %}{%- gen", "message.role == 'x' %}{%- gen"
    )
    last = TEMPLATE.replace("== 'assistant' %}", "== 'assistant' and loop.index0 == 6 %}", 1)
    refusals = {
        last: r"\[2\]: the template's generation marks leave no text",
        unmarked: "generation marks leave no text",
        PLAIN_TEMPLATE.replace(
            "assistant\\n", "assistant\\n<think>"
        ): r"prompt, '<think>' there and 'it answers<\|im_e' here, so that",
        "{{- raise_exception('no system') }}": r"refused by the chat template \(no system\)",
        "{{- messages[0].nothing.more }}": "refused by the chat template",
    }
    for template, says in refusals.items():
        tokenizer = make(tmp_path, template)
        with pytest.raises(TextError, match=says):
            encode(tokenizer, CHAT, None)


def test_a_template_that_needs_a_message_before_the_assistant_says_so(tmp_path: Path) -> None:
    # As Qwen's, which asks who speaks first.
    needs = "{%- if messages[0].role == 'system' %}{%- endif %}"
    answer = [CHAT[2]]
    with pytest.raises(TextError, match=r"begins with a turn of the assistant, .* put a system or"):
        encode(make(tmp_path / "qwen", needs + PLAIN_TEMPLATE), answer, None)
    for template in (PLAIN_TEMPLATE, needs + TEMPLATE):
        tokenizer = make(tmp_path / "other", template)
        (sample,) = encode(tokenizer, answer, None)
        assert trained(tokenizer, sample) == TURNS[:1]


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_templates_write_one_date(tmp_path: Path, template: str) -> None:
    writes = " \n {%- if strftime_now is defined %}{%- set now = strftime_now('%d %b %Y %-m') %}"
    writes += "{{- now }}{%- endif %}{{ strftime_now('%H:%M:%S.%f') }}\n"
    tokenizer = make(tmp_path / "clock", writes + template)
    (sample,) = encode(tokenizer, CHAT[:3], None)
    fixed = make(tmp_path / "fixed", "{{ '26 Jul 2024 700:00:00.000000' }}" + template)
    (expected,) = encode(fixed, CHAT[:3], None)
    assert tokenizer._backend.decode(sample.ids) == tokenizer._backend.decode(expected.ids)
    assert sample.loss_mask.tolist() == expected.loss_mask.tolist()


def test_special_tokens_that_a_text_has_are_not_added_again(tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    # As GLM's: two tokens, none of which is the BOS token.
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> <|im_start|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    tokenizer.save_pretrained(tmp_path)
    found = HfTokenizer(tmp_path)
    # Without the end that the tokenizer would add: the response follows.
    *expected, _ = AutoTokenizer.from_pretrained(tmp_path)("a question")["input_ids"]
    assert expected[:2] == [0, 1]
    assert found.encode_prompt("a question").tolist() == expected
    assert found.encode_prompt("<|endoftext|><|im_start|>a question").tolist() == expected
    ended = found.encode_response("a sentence").tolist()
    assert ended[-1] == 2
    assert found.encode_response("a sentence<|im_end|>").tolist() == ended
    # A prompt that is encoded after a chat begins as one before it.
    encode(found, CHAT[:3], None)
    assert found.encode_prompt("a question").tolist() == expected
    assert encode(HfTokenizer(tmp_path), CHAT[:3], None)[0].ids[0] == 1


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_white_space_counts_where_the_tokenizer_trims_offsets(
    tmp_path: Path, template: str
) -> None:
    from tokenizers import processors

    tokenizer = make_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    code = "\n\ndef f(x):\n\n    return x\n\n  "
    chat = [CHAT[1], {"role": "assistant", "content": code}]
    (sample,) = encode(HfTokenizer(tmp_path), chat, None)
    assert sample.ids.tolist() == by_transformers(tmp_path, chat)["input_ids"]
    assert trained(HfTokenizer(tmp_path), sample) == [code + "<|im_end|>"]


def test_a_tokenizer_is_named_by_the_content_of_its_files(tmp_path: Path) -> None:
    digests = set()
    keys = set()
    for number, template in enumerate((TEMPLATE, PLAIN_TEMPLATE, TEMPLATE)):
        tokenizer = make(tmp_path / str(number), template)
        digests.add(tokenizer.digest)
        keys.add(index_key("content", ReadSettings(tokenizer=tokenizer)))
    assert len(digests) == len(keys) == 2
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.digest == tokenizer.digest
    assert again.encode_prompt("so").tolist() == tokenizer.encode_prompt("so").tolist()


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; set data\.tokenizer_path"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be read .*; set data\.tokenizer_path"):
        HfTokenizer(tmp_path).encode_prompt("a")
    make(tmp_path, TEMPLATE)
    for name in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(TextError, match="needs a chat template"):
        encode(HfTokenizer(tmp_path), CHAT, None)


def test_encoding_does_not_import_torch(tmp_path: Path) -> None:
    make(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from megapack.job.data.hf_tokenizer import HfTokenizer\n"
        f"tokenizer = HfTokenizer(Path({str(tmp_path)!r})); tokenizer.digest\n"
        "assert 'transformers' not in sys.modules\n"
        "from megapack.job.data.tokenizer import Chat\n"
        "chat = Chat([{'role': 'assistant', 'content': 'a'}], None, [0], {})\n"
        "tokenizer.encode_chat(chat)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_chats_in_a_file_become_samples_of_one_rollout(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "model", THINKING)
    path = tmp_path / "data.jsonl"
    rows = [
        {"messages": CHAT, "tools": TOOLS, "reward": 0.5, "group": "g"},
        {"messages": CHAT[:3], "prompt": "a question", "tools": json.dumps(TOOLS)},
        {"prompt": "a question", "response": "a sentence"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset.from_files(path, ReadSettings(tokenizer=tokenizer), tmp_path)
    numbers = np.arange(4)
    assert data.lines(numbers) == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 3, 0)]
    assert data.rollout_ids(numbers) == [0, 0, 1, 2]
    assert [one.reward for one in data.rewards(numbers)] == [0.5, 0.5, None, None]
    samples = [*encode(tokenizer, CHAT, TOOLS), *encode(tokenizer, CHAT[:3], TOOLS)]
    for number, sample in enumerate(samples):
        found = data.tokens(number)
        ids = [*found.prompt_ids.tolist(), *found.response_ids.tolist()]
        mask = (
            np.ones(len(found.response_ids), bool) if found.loss_mask is None else found.loss_mask
        )
        assert ids == sample.ids.tolist()
        assert mask.tolist() == sample.loss_mask.tolist()[len(found.prompt_ids) :]
        assert mask[0], "the response begins at the first token that counts"
        assert data.loss_tokens(numbers)[number] == sample.loss_mask.sum()
    last = data.tokens(3)
    assert last.prompt_ids.tolist() == tokenizer.encode_prompt("a question").tolist()
    assert last.response_ids.tolist() == tokenizer.encode_response("a sentence").tolist()


def test_pairs_of_chats_train_what_differs(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "model", PLAIN_TEMPLATE)
    path = tmp_path / "data.jsonl"
    good = {"role": "assistant", "content": "yes"}
    bad = {"role": "assistant", "content": "no"}
    rows: list[dict[str, Any]] = [
        {"chosen": [*CHAT[:4], good], "rejected": [*CHAT[:4], bad]},
        {"prompt": CHAT[:4], "chosen": [good], "rejected": [bad]},
        {"prompt": CHAT[1]["content"], "chosen": [CHAT[1], good], "rejected": [CHAT[1], bad]},
        {"prompt": CHAT[1]["content"], "chosen": [good], "rejected": [bad]},
        {"prompt": CHAT[1:2], "chosen": [CHAT[1], good], "rejected": [CHAT[1], bad]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset.from_files(path, ReadSettings(tokenizer=tokenizer), tmp_path)
    numbers = np.arange(10)
    assert data.pair_signs(numbers) == [1, -1] * 5
    assert data.rollout_ids(numbers) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for number in range(10):
        tokens = data.tokens(number)
        chat = [*(CHAT[:4] if number < 4 else CHAT[1:2]), bad if number % 2 else good]
        ids = by_transformers(tmp_path / "model", chat)["input_ids"]
        assert [*tokens.prompt_ids.tolist(), *tokens.response_ids.tolist()] == ids
        # The newline after the turn does not count.
        assert tokens.loss_mask is not None
        assert tokens.loss_mask.tolist() == [True] * (len(tokens.response_ids) - 1) + [False]
    twin = {**good, "content": "yes", "reasoning_content": "so"}
    refusals = {
        json.dumps(
            {"chosen": [CHAT[1], good], "rejected": [CHAT[1], twin]}
        ): "rejected has reasoning_content of role assistant, which the chat template does",
        json.dumps({**rows[2], "prompt": "other"}): "prompt is no user's turn of chosen",
        json.dumps(
            {"chosen": CHAT[:2], "rejected": CHAT[:3]}
        ): "chosen has no turn of the assistant",
        json.dumps({"chosen": [good], "rejected": []}): "rejected is [], expected a list of mess",
    }
    for line, says in refusals.items():
        path.write_text(line + "\n")
        with pytest.raises(DataError) as caught:
            Dataset.from_files(path, ReadSettings(tokenizer=tokenizer), tmp_path)
        assert says in str(caught.value)


# What it calls is written by tojson, as Qwen's and Llama's templates do.
CALLING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in (message.tool_calls if 'tool_calls' in message else []) %}
{{- call.function.name + call.function.arguments | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- if tools %}{{- raise_exception(tools | tojson) }}{%- endif %}"""


def texts(tokenizer: HfTokenizer, path: Path) -> list[str]:
    """The text of each sample of a file."""
    data = Dataset.from_files(path, ReadSettings(tokenizer=tokenizer), path.parent)
    samples = [data.tokens(number) for number in range(len(data))]
    joined = [np.concatenate([one.prompt_ids, one.response_ids]) for one in samples]
    return [tokenizer._backend.decode(ids, skip_special_tokens=False) for ids in joined]


def calling(arguments: Any) -> list[Any]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return [CHAT[1], {"role": "assistant", "content": None, "tool_calls": calls}]


def test_messages_in_the_form_of_openai_are_read(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "model", CALLING)
    path = tmp_path / "data.jsonl"
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "question"}]
    chats = [
        calling({"a": 1}),
        calling('{"a": 1}'),
        [{**CHAT[1], "tool_calls": None}, *calling({"a": 1})[1:]],
        [{"role": "user", "content": parts}, *calling({"a": 1})[1:]],
    ]
    rows = [{"messages": chat} for chat in chats]
    rows += [
        {"messages": chats[0], "prompt": "a question"},
        {"messages": chats[0], "prompt": chats[0][:1]},
        {"messages": chats[0][1:], "prompt": "a question"},
        {"messages": chats[0][1:], "prompt": chats[0][:1]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    user = "<|im_start|>user\na question<|im_end|>\n"
    assert texts(tokenizer, path) == [
        user + '<|im_start|>assistant\nadd{"a": 1}<|im_end|>\n',
    ] * len(rows)


def test_parquet_rows_do_not_get_keys_of_others(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokenizer = make(tmp_path / "model", CALLING)
    rows = [{"messages": calling({"a": [1, None]})}, {"messages": calling({"b": 2})}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = [text.split("assistant\n")[1] for text in texts(tokenizer, tmp_path / "data.parquet")]
    assert found == ['add{"a": [1, null]}<|im_end|>\n', 'add{"b": 2}<|im_end|>\n']
    tools = [{"name": "add", "of": {"a": "int"}}, {"name": "sub", "of": {"b": "int"}}]
    rows = [{"messages": CHAT[1:3], "tools": [tool]} for tool in tools]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    with pytest.raises(DataError) as caught:
        texts(tokenizer, tmp_path / "data.parquet")
    assert "null" not in str(caught.value)
    # In JSON Lines a null was written by hand.
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": calling({"a": None})}) + "\n")
    assert '{"a": null}' in texts(tokenizer, path)[0]
