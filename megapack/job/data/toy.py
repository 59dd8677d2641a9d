"""A tiny model with a tokenizer, and data to train it on: SFT on a CPU without a download."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megapack.base.files import write_whole
from megapack.errors import ConfigError
from megapack.job.data.generated import generate_lengths

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens, from id 256 on."""
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_INIT_STD = 0.05
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
        ConfigError: the folder exists, or the package safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise ConfigError("a toy model needs safetensors; pip install safetensors") from None
    path = new_folder(folder)
    save_file(dict(_weights()), path / "model.safetensors", metadata={"format": "pt"})
    chats = (json.dumps(_chat(number)) + "\n" for number in range(num_chats))
    lengths = (f"{length}\n" for length in generate_lengths(512, 16384, seed=0))
    texts = {
        "config.json": json.dumps(_CONFIG, indent=2) + "\n",
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


def _weights() -> Iterator[tuple[str, Any]]:
    """Tensors by their names in transformers: norms are ones, the rest is drawn."""
    width, inner, head = (_CONFIG[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, groups = _CONFIG["num_attention_heads"], _CONFIG["num_key_value_heads"]
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (groups * head, width),
        "self_attn.v_proj": (groups * head, width),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.o_proj": (width, heads * head),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (_CONFIG["vocab_size"], width),
        "norm": (width,),
    }
    for number in range(_CONFIG["num_hidden_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, dtype=np.float32) * np.float32(_INIT_STD)
        yield f"model.{name}.weight", np.ones(shape, np.float32) if len(shape) == 1 else drawn


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
        "model": {
            "type": "BPE",
            "vocab": {shown[byte]: byte for byte in range(256)},
            "merges": [],
        },
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
