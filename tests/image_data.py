"""A tiny model's processor and tokenizer, and settings that read data with images."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megapack.job.data.dataset import Dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.images import ImageReader
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.toy_images import write_images
from tests.toy_towers import write_image_model

START, END, IMAGE, VIDEO = 259, 260, 261, 262


@functools.cache
def _session_folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="megapack-images-")


@functools.cache
def model_folder() -> Path:
    """A tiny Qwen3-VL, made once per process; it must not be changed."""
    folder = Path(_session_folders().name) / "model"
    write_image_model(folder)
    return folder


@functools.cache
def data_folder() -> Path:
    """A hundred chats and rollouts with images, made once per process."""
    folder = Path(_session_folders().name) / "data"
    write_images(folder, num_chats=100)
    return folder


def settings(**others: Any) -> ReadSettings:
    """Those of a run that trains the tower."""
    folder = model_folder()
    reader = ImageReader(folder, IMAGE, VIDEO)
    return ReadSettings(tokenizer=HfTokenizer(folder), images=reader, **others)


def read(path: Path, *rows: Mapping[str, Any], **others: Any) -> Dataset:
    """A data set of these rows, written to a file of JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.from_files(path, settings(**others), path.parent)


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG", **how: Any) -> bytes:
    """An image of noise."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).save(data, kind, **how)
    return data.getvalue()
