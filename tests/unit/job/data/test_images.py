"""Samples with images: ids, grids, positions and pixels are those of transformers' processor."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.errors import DataError
from megapack.images import ImageNumbers, ImageRef, checked_images, positions
from megapack.job.data import files
from megapack.job.data.dataset import Dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.images import SampleImage
from megapack.job.data.index import index_key
from megapack.job.data.rollouts import Rollout
from megapack.job.data.token_blocks import ReadSettings
from megapack.prefixes import SharedPrefixes
from tests.image_data import (
    END,
    IMAGE,
    START,
    data_folder,
    model_folder,
    picture,
    read,
    settings,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.unit

ONE = np.array([0])


def everything(data: Dataset) -> np.ndarray[Any, Any]:
    return np.arange(len(data))


def pixels_of(ref: ImageRef) -> Any:
    assert ref.pixels is not None
    return ref.pixels()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(*sources: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": source} for source in sources]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    return {"messages": [user, {"role": "assistant", "content": "it"}]}


def own_processor() -> Any:
    """The folder's, as AutoProcessor makes it where torchvision is installed."""

    class Processor(transformers.Qwen3VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> None:
            """There is none for videos."""

    folder = model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder)
    return Processor(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)


def as_transformers(messages: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """With the images where it looks for them."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        if one["type"] == "image_url":
            return {"type": "image", "url": one["image_url"]["url"]}
        if one["type"] == "image" and not one["image"].startswith("data:"):
            return {"type": "image", "path": str(folder / one["image"])}
        return one

    return [
        {**one, "content": list(map(part, one["content"]))}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]


def test_chats_are_those_of_the_processor() -> None:
    folder = data_folder()
    data = Dataset.from_files(folder / "chats.jsonl", settings(), folder)
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    assert len(data) == len(rows) == 100
    processor = own_processor()
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(model_folder())
        model = transformers.AutoModelForImageTextToText.from_config(config).model
    images = data.images(everything(data))
    checked_images(images, data.lengths.tolist())
    num_images = 0
    for number, (row, refs) in enumerate(zip(rows, images, strict=True)):
        wanted = processor.apply_chat_template(
            [as_transformers(row["messages"], folder)],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        tokens = data.tokens(number)
        ids = np.concatenate([tokens.prompt_ids, tokens.response_ids])
        assert ids.tolist() == wanted["input_ids"][0].tolist()
        mask = torch.as_tensor(wanted["assistant_masks"])[0]
        assert tokens.counts.tolist() == mask.bool().tolist()
        grids = wanted["image_grid_thw"].tolist() if refs else []
        assert [list(ref.grid) for ref in refs] == grids
        places, _ = model.get_rope_index(
            wanted["input_ids"],
            wanted["mm_token_type_ids"],
            wanted.get("image_grid_thw"),
            attention_mask=wanted["attention_mask"],
        )
        assert positions(refs, len(ids)).tolist() == places[:, 0].T.tolist()
        if refs:
            pixels = torch.cat(list(map(pixels_of, refs)))
            assert torch.equal(pixels, wanted["pixel_values"])
            assert pixels.dtype == torch.float32
        num_images += len(refs)
    assert num_images > 100


def test_rollouts_have_their_images_where_the_tokens_are() -> None:
    folder = data_folder()
    data = Dataset.from_files(folder / "rollouts.jsonl", settings(), folder)
    images = data.images(everything(data))
    assert sorted({len(refs) for refs in images}) == [1, 2]
    for number, refs in enumerate(images):
        tokens = data.tokens(number)
        ids = np.concatenate([tokens.prompt_ids, tokens.response_ids])
        where = [at for ref in refs for at in range(ref.offset, ref.end)]
        assert np.flatnonzero(ids == IMAGE).tolist() == where
        assert not tokens.counts[where].any()
    # A prompt group has one prompt and one image; other groups have other images.
    prefixes = data.prefixes(np.arange(8))
    shared = [common for common in prefixes.common if common]
    assert len(shared) >= 6


def test_prompts_with_other_images_of_equal_ids_share_nothing_of_them(tmp_path: Path) -> None:
    rows = [chat(uri(picture(16, 24, seed))) for seed in (1, 2, 1)]
    data = read(tmp_path / "a.jsonl", *rows)
    (one,), (other,), (again,) = data.images(everything(data))
    assert data.tokens(0).prompt_ids.tolist() == data.tokens(1).prompt_ids.tolist()
    assert (one.key == again.key, one.key == other.key, one.grid) == (True, False, (1, 6, 4))
    prefixes = data.prefixes(everything(data))
    assert prefixes.order == (0, 2, 1)
    assert prefixes.common[1] > one.end
    assert prefixes.common[2] == one.offset
    # The bytes of an image are stored once.
    assert data.stored_images is not None
    assert len(data.stored_images.sources) == sum(len(picture(16, 24, n)) for n in (1, 2))


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_those_of_whole_samples(seed: int, tmp_path: Path) -> None:
    """They are read piece by piece, which may begin inside of an image."""
    rng = np.random.default_rng(seed)
    # An image of 50 tokens each.
    for name in "ab":
        (tmp_path / name).write_bytes(picture(80, 40, ord(name)))
    rows = []
    for _ in range(12):
        text = [[5] * int(n) for n in rng.choice([1, 40, 230], 3)]
        names = rng.choice(["a", "b"], 3, p=[0.8, 0.2]).tolist()
        ids = [token for part in text for token in (*part, *[IMAGE] * 50)]
        rows.append({"prompt_ids": [*ids, 6], "response_ids": [7, 8], "images": names})
    data = read(tmp_path / "a.jsonl", *rows)
    numbers = ImageNumbers()
    compared = [
        numbers.compared(np.array(row["prompt_ids"] + row["response_ids"]), refs)
        for row, refs in zip(rows, data.images(everything(data)), strict=True)
    ]
    assert data.prefixes(everything(data)) == SharedPrefixes.from_samples(compared)


def test_the_digest_is_of_what_is_trained(tmp_path: Path) -> None:
    one, other, padded = (chat(uri(picture(16, 16, seed))) for seed in (1, 2, 1))
    digests = [
        read(tmp_path / f"{n}.jsonl", row).samples_digest
        for n, row in enumerate((one, other, {**padded, "note": 1}))
    ]
    assert (digests[0] == digests[2], digests[0] == digests[1]) == (True, False)


def test_a_copy_of_files_has_the_digest_and_no_other_file_the_key(tmp_path: Path) -> None:
    file = tmp_path / "a.bmp"
    keys, digests = set(), set()
    for seed in (1, 2):
        # Of the same size in bytes.
        file.write_bytes(picture(16, 16, seed, "BMP"))
        os.utime(file, ns=(0, seed))
        data = read(tmp_path / "a.jsonl", chat("a.bmp"))
        digests.add(data.samples_digest)
        keys |= {ref.key for ref in data.images(ONE)[0]}
    assert (len(keys), len(digests)) == (2, 1)


def test_bytes_of_parquet_and_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    first, second = picture(16, 16, 1), picture(24, 16, 2)
    (tmp_path / "b.png").write_bytes(second)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what?"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "it"}]},
    ]
    rows = [{"messages": messages, "images": [{"bytes": first}, {"path": "b.png"}]}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = Dataset.from_files(tmp_path / "a.parquet", settings(), tmp_path)
    inline = read(tmp_path / "c.jsonl", chat(uri(first), "b.png"))
    assert data.tokens(1).prompt_ids.tolist() == inline.tokens(0).prompt_ids.tolist()
    assert [ref for refs in data.images(everything(data)) for ref in refs] == [
        *inline.images(ONE)[0],
    ] * 2
    # Bytes in the messages themselves.
    part = {"type": "image", "image": {"bytes": first, "path": None}}
    row = {"messages": [{"role": "user", "content": [part]}, *messages[1:]]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    data = Dataset.from_files(tmp_path / "d.parquet", settings(), tmp_path)
    ((ref,),) = data.images(ONE)
    assert ref.key == inline.images(ONE)[0][0].key


def test_pairs_differ_by_images_alone(tmp_path: Path) -> None:
    one, other = uri(picture(16, 16, 1)), uri(picture(16, 16, 2))
    answer = {"role": "assistant", "content": "it"}
    chosen, rejected = ([*chat(source)["messages"][:1], answer] for source in (one, other))
    data = read(tmp_path / "a.jsonl", {"chosen": chosen, "rejected": rejected})
    assert data.tokens(0).response_ids.tolist() == data.tokens(1).response_ids.tolist()
    # The column's images are those of both sides.
    prompt = [{"role": "user", "content": [{"type": "image"}]}]
    turns = ([{**answer, "content": text}] for text in ("yes", "no"))
    row = dict(zip(("chosen", "rejected"), turns, strict=True), prompt=prompt, images=[one])
    data = read(tmp_path / "b.jsonl", row)
    (preferred,), (rejected_ref,) = data.images(everything(data))
    assert preferred == rejected_ref


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_image_is_turned_as_exif_says(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    processor = transformers.AutoImageProcessor.from_pretrained(model_folder())
    file = tmp_path / "a.img"
    for kind in ("JPEG", "PNG"):
        file.write_bytes(picture(16, 40, kind=kind, exif=exif))
        data = read(tmp_path / "a.jsonl", chat("a.img"))
        ((ref,),) = data.images(ONE)
        assert ref.grid == ((1, 4, 10) if orientation > 4 else (1, 10, 4))
        upright = transformers.image_utils.load_image(str(file))
        wanted = processor(images=[upright], return_tensors="pt")["pixel_values"]
        assert torch.equal(pixels_of(ref), wanted)


def test_a_turn_that_the_header_does_not_tell_is_an_error(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    before, data, end = re.split(rb"(?=....IDAT|....IEND)", picture(16, 40, exif=exif), flags=re.S)
    begin = before.index(b"eXIf") - 4
    moved = before[:begin] + data + before[begin:] + end
    data_set = read(tmp_path / "a.jsonl", chat(uri(moved)))
    ((ref,),) = data_set.images(ONE)
    with pytest.raises(DataError, match=r"10 x 4 patches by its header, but its grid is \[\["):
        pixels_of(ref)


def test_several_workers_give_the_same_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More blocks than one process would read by itself.
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1)
    rows = [chat(uri(picture(16, 16, seed % 3))) for seed in range(12)]
    for folder in ("one", "three"):
        (tmp_path / folder).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / folder / "a.jsonl").write_text("".join(lines))
    one, three = (
        Dataset.from_files(tmp_path / folder / "a.jsonl", settings(), tmp_path, num_workers)
        for folder, num_workers in (("one", 1), ("three", 2))
    )
    assert one.samples_digest == three.samples_digest
    assert one.images(everything(one)) == three.images(everything(three))
    stored = [
        {file.suffixes[-2]: file.read_bytes() for file in (tmp_path / name).glob(".*.npy")}
        for name in ("one", "three")
    ]
    assert stored[0] == stored[1]
    assert ".megapack-sources" in stored[0]


@pytest.mark.parametrize("most", range(4, 24))
def test_truncation_never_cuts_an_image(most: int, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    image = [IMAGE] * 4
    row = {
        "prompt_ids": [1, START, *image, END],
        "response_ids": [2, START, *image, END, START, *image, END, 3, 4],
        "response_mask": [1, *[0] * 12, 1, 1],
        "images": ["a.png"] * 3,
    }
    allowed = {"max_length": most, "overlong": "truncate"}
    whole = [*row["prompt_ids"], *row["response_ids"]]  # type: ignore[misc]
    if most < 8:
        with pytest.raises(DataError, match="no sample"):
            read(tmp_path / "a.jsonl", row, **allowed)
        return
    data = read(tmp_path / "a.jsonl", row, **allowed)
    (refs,) = data.images(ONE)
    tokens = data.tokens(0)
    ids = np.concatenate([tokens.prompt_ids, tokens.response_ids]).tolist()
    assert ids == whole[: len(ids)]
    checked_images([refs], [len(ids)])
    assert ids.count(IMAGE) == 4 * len(refs)
    # It is as long as it can be.
    longer = whole[:most]
    assert len(ids) == len(longer) or (longer[-1] == IMAGE and IMAGE in longer[len(ids) :])


def test_pixels_are_read_on_threads_and_after_pickling(tmp_path: Path) -> None:
    data = read(tmp_path / "a.jsonl", *(chat(uri(picture(40, 40, n))) for n in range(6)))
    refs = [ref for refs in data.images(everything(data)) for ref in refs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(pixels_of, refs * 4))
    for one, ref in zip(found, refs * 4, strict=True):
        assert torch.equal(one, pixels_of(ref))
    reader = settings().images
    assert reader is not None
    assert reader.backend == "Qwen2VLImageProcessorPil"
    again = pickle.loads(pickle.dumps(reader))
    assert torch.equal(again.pixels(picture(40, 40, 0), 10, 10), found[0])


def test_the_key_of_an_index_is_of_the_reader(tmp_path: Path) -> None:
    now = settings()
    assert now.images is not None
    others = [
        dataclasses.replace(now, images=None),
        dataclasses.replace(now, images=dataclasses.replace(now.images, merge=1)),
        dataclasses.replace(now, images=dataclasses.replace(now.images, video_token=None)),
        dataclasses.replace(now, images=dataclasses.replace(now.images, folder=tmp_path)),
    ]
    moved = dataclasses.replace(now, images=dataclasses.replace(now.images, data_folder=tmp_path))
    assert len({index_key("content", each) for each in (now, *others)}) == 5
    assert index_key("content", now) == index_key("content", moved)


def test_nothing_is_decoded_before_pixels_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [uri(picture(16, 16, kind=kind)) for kind in ("PNG", "JPEG", "WEBP")]

    def refuse(self: Any) -> None:
        raise AssertionError("decoded")

    with monkeypatch.context() as patched:
        for plugin in ("PngImagePlugin.PngImageFile", "JpegImagePlugin.JpegImageFile"):
            patched.setattr(f"PIL.{plugin}.load", refuse)
        patched.setattr("PIL.ImageFile.ImageFile.load", refuse)
        data = read(tmp_path / "a.jsonl", chat(*sources))
    assert [len(pixels_of(ref)) for ref in data.images(ONE)[0]] == [16] * 3


def test_a_file_that_changes_or_is_cut_off_is_found_when_pixels_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(picture(40, 40, kind="JPEG"))
    cut = picture(40, 40, kind="JPEG")[:-100]
    data = read(tmp_path / "a.jsonl", chat("a.jpg"), chat(uri(cut)))
    (whole,), (truncated,) = data.images(everything(data))
    with pytest.raises(DataError, match=r"a\.jsonl:2: image 0 cannot be decoded \(image file is t"):
        pixels_of(truncated)
    assert len(pixels_of(whole)) == 100
    path.write_bytes(picture(40, 48, kind="JPEG"))
    with pytest.raises(DataError, match=r"a\.jsonl:1: image 0 \(a\.jpg\) has changed since the"):
        pixels_of(whole)
    # Opened again, it is read again.
    data = Dataset.from_files(tmp_path / "a.jsonl", settings(), tmp_path)
    assert len(pixels_of(data.images(ONE)[0][0])) == 120


_PNG = uri(picture(16, 16))
_IDS = {"prompt_ids": [1, START, *[IMAGE] * 4, END], "response_ids": [2, 3], "images": [_PNG]}
_BOMB = io.BytesIO()
Image.new("1", (20_000, 20_000)).save(_BOMB, "PNG")
_DEEP = io.BytesIO()
Image.new("I;16", (16, 16)).save(_DEEP, "PNG")
BAD: list[tuple[dict[str, Any], str]] = [
    (chat("https://a.b/c.png"), 'image 0 of messages is "https://a.b/c.png", not fetched; give a'),
    (chat("no.png"), 'image 0 of messages is "no.png", which cannot be read (No such file or dir'),
    (chat("a\0b"), "which cannot be read (embedded null byte)"),
    (chat(_PNG, "."), "image 1 of messages (.) cannot be read (Is a directory)"),
    (chat("bad.jsonl"), "image 0 of messages (bad.jsonl) is no image that pillow reads"),
    (chat("data:image/png,abc"), "a data URI that cannot be read (not base64); write data:image/"),
    (chat("data:image/png;base64,a!"), "a data URI that cannot be read ("),
    (chat(uri(picture(16, 16)[:20])), "cannot be read ("),
    (chat(uri(_BOMB.getvalue())), "is too large (Image size (400000000 pixels) exceeds limit of"),
    (chat(uri(_DEEP.getvalue())), "has pixels of mode I;16, which become white or black in 8 bits"),
    (chat(uri(picture(300, 1))), "cannot be read (absolute aspect ratio must be smaller than 200"),
    (chat(3), "image 0 of messages is 3, expected a path, a data URI or bytes"),
    (chat(None), "images has 0, messages has 1 parts of type image without a source; give"),
    ({**chat(None), "images": [_PNG, _PNG]}, "images has 2, messages has 1 parts of type image"),
    ({**chat(_PNG), "images": [_PNG]}, "images has 1, messages has 0 parts of type image without"),
    ({**chat(_PNG), "images": "a.png"}, 'images is "a.png", expected a list of images'),
    (
        {"messages": [{"role": "user", "content": "<|image_pad|>"}, *chat()["messages"][1:]]},
        "messages has 0 images and 1 tokens <|image_pad|>; give a chat template that writes one",
    ),
    (
        {"messages": [*chat(_PNG)["messages"], {"role": "assistant", "content": "<|image_pad|>"}]},
        "messages has 1 images and 2 tokens <|image_pad|>",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "<|image_pad|>"},
                {"role": "assistant", "content": [{"type": "image", "image": _PNG}]},
            ]
        },
        "messages has 1 images and 1 tokens <|image_pad|>",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
                *chat()["messages"][1:],
            ]
        },
        "messages[0].content[0] is of type video: only text and images are trained",
    ),
    (
        {"messages": [{"role": "user", "content": "<|video_pad|>"}, *chat()["messages"][1:]]},
        "has the video token 262: only text and images are trained",
    ),
    ({"prompt": "a", "response": "b", "images": [_PNG]}, "has images, which only a chat has"),
    ({"prompt": "a", "response": "<|image_pad|>."}, "images has 0, the token ids have 1 runs of"),
    ({**_IDS, "images": []}, "images has 0, the token ids have 1 runs of the image token 261"),
    ({**_IDS, "images": [_PNG, _PNG]}, "images has 2, the token ids have 1 runs"),
    (
        {**_IDS, "prompt_ids": [START, IMAGE, END]},
        "images[0] has 4 x 4 patches, which are 4 tokens, and its run has 1 (an engine may give",
    ),
    (
        {**_IDS, "prompt_ids": [START, *[IMAGE] * 5, END]},
        "images[0] has 4 x 4 patches, which are 4 tokens, and its run has 5; give a token per",
    ),
    ({**_IDS, "images": ["http://a/b"]}, 'images[0] is "http://a/b", not fetched'),
    (
        {**_IDS, "prompt_ids": [1], "response_ids": [2, *[IMAGE] * 4, 3]},
        "an image of the response counts in the loss; give a response_mask with 0",
    ),
    (
        {
            **_IDS,
            "prompt_ids": [1],
            "response_ids": [2, *[IMAGE] * 4, 3],
            "response_mask": [1, 0, 0, 0, 1, 1],
        },
        "an image of the response counts in the loss",
    ),
    (
        {"prompt_ids": [1], "chosen_ids": [*[IMAGE] * 4, 2], "rejected_ids": [3], "images": [_PNG]},
        "an image of the response counts in the loss",
    ),
    ({**_IDS, "prompt_ids": [START, *[IMAGE] * 4], "response_ids": []}, "ends with an image; give"),
    ({**_IDS, "prompt_ids": [262]}, "images has 1, the token ids have 0 runs"),
    ({**_IDS, "image": "a.png"}, "has image, which is not read; give images, a list"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_bad_images_are_refused_in_one_line(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    with pytest.raises(DataError) as caught:
        read(path, chat(_PNG), row)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < 400
    assert files.list_files(tmp_path) == [path], "nothing is left"


def with_template(folder: Path, old: str, new: str) -> ReadSettings:
    """Settings with the toy's template changed."""
    shutil.copytree(model_folder(), folder)
    file = folder / "chat_template.jinja"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return dataclasses.replace(settings(), tokenizer=HfTokenizer(folder))


def test_a_template_that_leaves_images_out_is_refused(tmp_path: Path) -> None:
    now = with_template(tmp_path / "model", "<|image_pad|>", "an image")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat(_PNG)) + "\n")
    with pytest.raises(DataError, match=r"messages has 1 images and 0 tokens <\|image_pad\|>"):
        Dataset.from_files(path, now, tmp_path)


def test_samples_of_a_chat_have_the_images_before_their_last_turn(tmp_path: Path) -> None:
    # A template that shortens the turns before the last.
    now = with_template(
        tmp_path / "model", "message.content or ''", "message.content if loop.last else '-'"
    )
    sources = [uri(picture(16, 16 + 8 * n, n)) for n in range(3)]
    turns = [message for source in sources for message in chat(source)["messages"]]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    data = Dataset.from_files(path, now, tmp_path)
    grids = [[ref.grid[1:] for ref in refs] for refs in data.images(everything(data))]
    assert grids == [[(4, 4)], [(4, 4), (6, 4)], [(4, 4), (6, 4), (8, 4)]]


def test_an_image_that_the_assistant_shows_does_not_count(tmp_path: Path) -> None:
    now = with_template(tmp_path / "model", "message.content or ''", "written(message.content)")
    user, answer = chat()["messages"]
    answer["content"] = [*chat(_PNG)["messages"][0]["content"], {"type": "text", "text": "it"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [user, answer]}) + "\n")
    tokens = Dataset.from_files(path, now, tmp_path).tokens(0)
    is_image = tokens.response_ids == IMAGE
    assert tokens.loss_mask is not None
    # Nor does the line break after it.
    assert tokens.loss_mask.tolist() == [*(~is_image[:-1]).tolist(), False]
    assert is_image.sum() == 4


def test_text_beside_an_image_that_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    now = with_template(tmp_path / "model", "part.text", "''")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat(_PNG)) + "\n")
    with pytest.raises(DataError, match="messages has content of role user, which the chat templ"):
        Dataset.from_files(path, now, tmp_path)


def test_a_cut_after_two_images_without_text_between_leaves_both_out() -> None:
    ids = np.array([1, *[IMAGE] * 8, 2])
    images = tuple(SampleImage(b"", 4, 4, 4, "a", offset) for offset in (1, 5))
    whole = Rollout(prompt_ids=ids[:0], response_ids=ids, group=0, rollout=0, images=images)
    cut = [whole.cut(most) for most in range(1, 11)]
    assert [(one.num_tokens, len(one.images)) for one in cut] == [(1, 0)] * 9 + [(10, 2)]
