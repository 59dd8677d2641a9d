"""The images of one line of a data file, and where they stand among the tokens of its samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megapack.job.data.images.reader import ImageReader, SampleImage
from megapack.job.data.messages import BadLine, Conversation, image_parts, shown
from megapack.job.data.tokenizer import ChatTokens, Ids, Mask, Message

Images = tuple[SampleImage, ...]


@dataclass(frozen=True)
class LineImages:
    """The images that a line of a data file gives."""

    reader: ImageReader | None
    """None: images are refused."""
    column: Any
    """The cell `images`; None or empty = not given."""
    _found: dict[str, SampleImage] = field(default_factory=dict)
    """By key, those of chats."""

    def __post_init__(self) -> None:
        if self.column and not isinstance(self.column, list):
            raise BadLine(f"images is {shown(self.column)}, expected a list of images")
        if self.column:
            self._allowed()

    def _allowed(self) -> ImageReader:
        if self.reader is None:
            raise BadLine("has images, which are not read; set model.vision to frozen or train")
        return self.reader

    def find(self, key: str, chat: Conversation) -> Conversation:
        """The chat, in which the images' keys have taken the place of their sources.

        Args:
            key: the chat's column.

        Raises:
            BadLine: an image cannot be read, or the column `images` has another number than parts
                without a source.
        """
        parts = [part for message in chat.messages for part in image_parts(message)]
        if not parts and not self.column:
            return chat
        reader = self._allowed()
        column = [(f"images[{number}]", source) for number, source in enumerate(self.column or ())]
        num_without = sum("image" not in part for part in parts)
        if num_without != len(column):
            raise BadLine(
                f"images has {len(column)}, {key} has {num_without} parts of type image without a "
                "source; give one each"
            )
        left = iter(column)
        for number, part in enumerate(parts):
            name = f"image {number} of {key}"
            image = reader.find(*((name, part["image"]) if "image" in part else next(left)))
            part["image"] = image.key.hex()
            self._found[part["image"]] = image
        return chat

    def of_chat(
        self, key: str, chat: ChatTokens, messages: Sequence[Message], image_text: str
    ) -> tuple[Ids, Mask, Images]:
        """Ids and mask of a sample with as many tokens per image as it has features.

        Args:
            messages: of the whole chat, as `find` gives them.
            image_text: what the tokenizer reads as an image token.

        Raises:
            BadLine: the template does not write one token per image, or a text has one.
        """
        if self.reader is None:
            return chat.ids, chat.loss_mask, ()
        own = messages[: chat.num_messages]
        images = [self._found[part["image"]] for one in own for part in image_parts(one)]
        is_image = chat.ids == self.reader.image_token
        where = np.flatnonzero(is_image)
        texts = json.dumps(own, ensure_ascii=False, default=repr) if len(where) else ""
        if len(where) != len(images) or image_text in texts:
            raise BadLine(
                f"{key} has {len(images)} images and {len(where)} tokens {image_text}; give a chat "
                "template that writes one for each image, and leave it out of texts"
            )
        repeats = np.ones(len(chat.ids), dtype=np.int64)
        repeats[where] = [image.tokens for image in images]
        ids = np.repeat(chat.ids, repeats)
        mask = np.repeat(chat.loss_mask & ~is_image, repeats)
        starts = (np.cumsum(repeats) - repeats)[where].tolist()
        placed = zip(images, starts, strict=True)
        return ids, mask, tuple(dataclasses.replace(one, offset=start) for one, start in placed)

    def place(self, fields: dict[str, Any]) -> None:
        """Add `images` to a sample's fields: those of a chat are there already.

        Raises:
            BadLine: they do not fit the token ids, or the sample cannot be trained.
        """
        if self.reader is None:
            return
        num_prompt = len(fields["prompt_ids"])
        ids = np.concatenate([fields["prompt_ids"], fields["response_ids"]])
        if "images" not in fields:
            fields["images"] = self._of_ids(self.reader, ids)
        if (ids == self.reader.video_token).any():
            raise BadLine(
                f"has the video token {self.reader.video_token}: only text and images are "
                "trained; leave the line out"
            )
        is_image = ids == self.reader.image_token
        if is_image[-1]:
            raise BadLine("ends with an image; give the text that follows it")
        mask = fields.get("loss_mask")
        if (is_image[num_prompt:] & (True if mask is None else mask)).any():
            raise BadLine(
                "an image of the response counts in the loss; give a response_mask with 0 for "
                "image tokens"
            )

    def _of_ids(self, reader: ImageReader, ids: Ids) -> Images:
        """The images of the column where their tokens stand: one run each.

        Raises:
            BadLine: there are other runs, or one has another length than its image.
        """
        runs = _runs(ids == reader.image_token)
        sources = self.column or []
        if len(runs) != len(sources):
            raise BadLine(
                f"images has {len(sources)}, the token ids have {len(runs)} runs of the image "
                f"token {reader.image_token}; give one run for each image"
            )
        placed = []
        for number, ((start, length), source) in enumerate(zip(runs, sources, strict=True)):
            image = reader.find(f"images[{number}]", source)
            if length != image.tokens:
                engine = " (an engine may give one that stands for all)" if length == 1 else ""
                raise BadLine(
                    f"images[{number}] has {image.rows} x {image.columns} patches, which are "
                    f"{image.tokens} tokens, and its run has {length}{engine}; give a token per "
                    "feature"
                )
            placed.append(dataclasses.replace(image, offset=start))
        return tuple(placed)


def _runs(is_image: Mask) -> list[tuple[int, int]]:
    """Start and length of each run of tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_image, [False]])))
    return [(start, stop - start) for start, stop in edges.reshape(-1, 2).tolist()]
