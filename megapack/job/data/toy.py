"""A tiny model with a tokenizer, and data to train it on: SFT on a CPU without a download."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapack.base.files import write_whole
from megapack.errors import ConfigError
from megapack.job.data.generated import generate_lengths

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens, from id 256 on."""
_CONFIG: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_INIT_STD = 0.08
# ChatML with tools. What is between the generation marks is trained: an answer with its end.
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


def write_toy(folder: str | Path, num_chats: int = 128) -> None:
    """Write a Qwen3 with two layers and random weights, a tokenizer of bytes, chats and lengths.

    The files are the same on every machine: `config.json`, `model.safetensors`, `tokenizer.json`
    with `tokenizer_config.json` and `chat_template.jinja`, `chats.jsonl` with several turns and
    calls of a tool, and `lengths.csv` for `megapack plan`.

    Raises:
        ConfigError: the folder exists, or transformers or torch are not installed.
    """
    path = new_folder(folder)
    write_model(path, "Qwen3ForCausalLM", _CONFIG)
    chats = (json.dumps(_chat(number)) + "\n" for number in range(num_chats))
    lengths = (f"{length}\n" for length in generate_lengths(512, 16384, seed=0))
    texts = {
        **tokenizer_files(SPECIAL, TEMPLATE),
        "chats.jsonl": "".join(chats),
        "lengths.csv": "".join(["length\n", *lengths]),
    }
    for name, text in texts.items():
        write_whole(path / name, text)


def new_folder(folder: str | Path) -> Path:
    """Make a folder for a toy; ConfigError if it exists."""
    path = Path(folder)
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}); set a folder that does not exist"
        ) from None
    return path


def tokenizer_files(special: Sequence[str], template: str) -> dict[str, str]:
    """The files of a tokenizer of bytes by their names: with special tokens from id 256 on, which
    begin with `SPECIAL`, and a chat template."""
    return {
        "tokenizer.json": json.dumps(_tokenizer(special), indent=1) + "\n",
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
            }
        ),
        "chat_template.jinja": template,
    }


def write_model(path: Path, name: str, keys: dict[str, Any]) -> None:
    """Write a model with random weights into a folder, the same on every machine.

    Weights are larger than usual, so that errors show.

    Args:
        name: its class in transformers.
        keys: of its config; the others are as transformers assumes.

    Raises:
        ConfigError: transformers or torch are not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "a toy model needs transformers and torch; pip install transformers torch"
        ) from None
    kind = getattr(transformers, name)
    # transformers changes what it is given.
    model = kind(kind.config_class(**copy.deepcopy(keys))).float()
    _randomize(model)
    bar_was_on = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(path)
    if bar_was_on:
        transformers.logging.enable_progress_bar()


def _randomize(model: Any) -> None:
    """Draw all weights. Decays of recurrent layers are mild: they forget within tens of tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            noise = torch.randn(param.shape, generator=generator)
            if name.endswith("A_log"):
                param.copy_(0.5 * noise - 2.5)
            elif "norm" in name and name.endswith("weight"):
                # Around ones, or around zeros where the norm adds 1.
                param.add_(torch.rand(param.shape, generator=generator) - 0.5)
            elif "conv1d" in name:
                param.copy_(0.4 * noise)
            else:
                param.copy_(_INIT_STD * noise)


def _tokenizer(special: Sequence[str]) -> dict[str, Any]:
    """`tokenizer.json` of bytes, as byte-level tokenizers write them, and special tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    # A byte that is no visible character is written as one above 255.
    shown = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + number,
                "content": text,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for number, text in enumerate(special)
        ],
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "vocab": {shown[byte]: byte for byte in range(256)}, "merges": []},
    }


def _chat(number: int) -> dict[str, Any]:
    """Two sums, the second of which a tool adds up in every other chat."""
    rng = random.Random(number)
    a, b, c = (rng.randrange(10) for _ in range(3))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": f"What is {a} plus {b}?"},
        {"role": "assistant", "content": f"It is {a + b}."},
        {"role": "user", "content": f"And {c} more?"},
    ]
    if number % 2:
        return {"messages": [*messages, {"role": "assistant", "content": f"It is {a + b + c}."}]}
    call = {"name": "add", "arguments": {"a": a + b, "b": c}}
    messages += [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": f"{a + b + c}"},
        {"role": "assistant", "content": f"It is {a + b + c}."},
    ]
    return {"messages": messages, "tools": _TOOLS}
