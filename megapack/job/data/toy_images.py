"""A tiny model with a vision tower, and data with images to train it on: on a CPU, no download."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megapack.base.files import write_whole
from megapack.errors import ConfigError
from megapack.job.data.toy import SPECIAL, TEMPLATE, new_folder, tokenizer_files, write_model

_SPECIAL = (*SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_VISION_START, _VISION_END, _IMAGE, _VIDEO = range(256 + len(SPECIAL), 256 + len(_SPECIAL))
_IDS = {
    "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
}
_EOS = 258
_PATCH = 4
_MERGE = 2
# The toy's template, with content in parts where it is not the assistant's.
_TEMPLATE = """\
{%- macro written(content) %}{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{%- endmacro %}
""" + TEMPLATE.replace("message.content + '<", "written(message.content) + '<")

TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": _MERGE,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
"""Keys of the tower's config."""
DECODER: dict[str, Any] = {
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": _EOS,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
"""Keys of the decoder's config."""
# Images of 4 to 200 patches.
_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * _PATCH**2, "longest_edge": 200 * _PATCH**2},
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "merge_size": _MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_image_model(
    folder: str | Path,
    name: str = "Qwen3VL",
    decoder: dict[str, Any] = DECODER,
    tower: dict[str, Any] = TOWER,
) -> None:
    """Write a model with random weights, its tokenizer of bytes and its image processor.

    Args:
        name: beginning of its classes' names in transformers.

    Raises:
        ConfigError: the folder exists, or transformers or torch are not installed.
    """
    path = new_folder(folder)
    parts = {"text_config": decoder, "vision_config": tower, "tie_word_embeddings": False}
    write_model(path, f"{name}ForConditionalGeneration", parts | _IDS)
    files = tokenizer_files(_SPECIAL, _TEMPLATE)
    files["preprocessor_config.json"] = json.dumps(_PROCESSOR, indent=2) + "\n"
    for file, text in files.items():
        write_whole(path / file, text)


def write_images(folder: str | Path, num_chats: int = 48, num_groups: int = 8) -> None:
    """Write small images into a folder, chats about them and rollouts with them.

    `chats.jsonl` has several turns; images as paths, as data URIs and in OpenAI's form; every sixth
    chat has none. `rollouts.jsonl` has prompt groups of four in token ids; in every other group a
    tool gives an image in the middle of the responses, which does not count in the loss.

    Raises:
        ConfigError: pillow is not installed.
    """
    path = Path(folder)
    (path / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    chats = [_chat(path, number, rng) for number in range(num_chats)]
    rollouts = [row for number in range(num_groups) for row in _rollouts(path, number, rng)]
    for name, rows in (("chats", chats), ("rollouts", rollouts)):
        write_whole(path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


_COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 50, 220)}


def _draw(path: Path, color: str, size: tuple[int, int], rng: np.random.Generator) -> str:
    """Write an image with a shape of this color on noise; returns its path in the folder."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ConfigError("toy images need pillow; pip install pillow") from None
    width, height = size
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    shape = draw.ellipse if rng.integers(2) else draw.rectangle
    shape((width // 8, height // 8, width * 7 // 8, height * 7 // 8), fill=_COLORS[color])
    number = len(list((path / "images").iterdir()))
    name = f"images/{number}.{('png', 'jpeg')[rng.integers(2)]}"
    image.save(path / name)
    return name


def _data_uri(path: Path) -> str:
    return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _chat(path: Path, number: int, rng: np.random.Generator) -> dict[str, Any]:
    """One to three questions about an image each, or about none."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Name the color."}]
    for turn in range(1 + number % 3):
        color = list(_COLORS)[rng.integers(3)]
        content: Any = f"Which color is {color}?"
        if number % 6 < 5:
            width, height = rng.integers(8, 64, 2).tolist()
            name = _draw(path, color, (width, height), rng)
            uri = _data_uri(path / name)
            text = {"type": "text", "text": "Which color?"}
            part = (
                {"type": "image", "image": name},
                {"type": "image", "image": uri},
                {"type": "image_url", "image_url": {"url": uri}},
            )[(number + turn) % 3]
            content = [part, text] if turn % 2 == 0 else [text, part]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": f"It is {color}."},
        ]
    return {"messages": messages}


def _rollouts(path: Path, number: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """A prompt group: four answers, the right one with a reward."""
    color, other = list(_COLORS)[rng.integers(3)], list(_COLORS)[rng.integers(3)]
    shown = _drawn_ids(path, color, rng)
    seen = _drawn_ids(path, other, rng)
    for answer in (*_COLORS, "I do not know"):
        response, mask, images = [*b"I look: "], [1] * 8, [shown[0]]
        if number % 2:
            response += seen[1]
            mask += [0] * len(seen[1])
            images.append(seen[0])
        said = [*answer.encode(), _EOS]
        yield {
            "prompt_ids": [*b"Which color? ", *shown[1]],
            "response_ids": response + said,
            "response_mask": mask + [1] * len(said),
            "reward": float(answer == color),
            "group": number,
            "images": images,
        }


def _drawn_ids(path: Path, color: str, rng: np.random.Generator) -> tuple[str, list[int]]:
    """An image of whole tokens, and what stands for it."""
    rows, columns = rng.integers(1, 6, 2).tolist()
    side = _PATCH * _MERGE
    name = _draw(path, color, (columns * side, rows * side), rng)
    return name, [_VISION_START, *[_IMAGE] * (rows * columns), _VISION_END]
