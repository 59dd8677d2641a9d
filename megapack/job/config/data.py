"""The config's section `data`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack.base.choices import Overlong
from megapack.config.bounds import at_least, without_effect
from megapack.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where rollouts come from."""

    path: str | None = None
    """JSON Lines, Parquet, or a folder of such files; null = generated rollouts."""
    prompts_per_batch: int = 32
    """Prompt groups (prompts with all their rollouts) per batch."""
    max_length: int | None = None
    """Tokens of the longest sample; null = model.max_position_embeddings."""
    overlong: Overlong = "error"
    """A sample above `max_length`: an error, cut to its first tokens, or skipped with a warning."""
    tokenizer: Literal["bytes", "hf"] | None = None
    """For text and chats: a Hugging Face folder's (hf), or one token per byte (bytes; no chats).
    null = hf if a folder is known."""
    tokenizer_path: str | None = None
    """The folder with `tokenizer.json`; null = model.hf_path."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Arguments of the chat template, such as {enable_thinking: false}; a line's own come first."""
    workers: int | None = None
    """Processes per node that tokenize; null = one per core."""
    num_generated: int = 256
    """Rollouts or pairs to generate if `path` is null; a multiple of `generated_group_size`."""
    generated_group_size: int = 4
    """Generated rollouts or pairs per prompt."""
    generated_seed: int = 0
    """Seed of generated rollouts."""
    shuffle: bool = False
    """Shuffle the prompt groups in each epoch, by `seed`."""
    balance_window: int = 1
    """Consecutive batches that exchange prompt groups until their work is about equal; 1 = off."""
    drop_equal_rewards: bool = False
    """Leave out prompt groups whose rewards are all equal (DAPO's dynamic sampling). Refused with
    advantage_norm=none or a critic."""

    def __post_init__(self) -> None:
        at_least(self, "data", 1, "prompts_per_batch", "max_length", "num_generated")
        at_least(self, "data", 1, "generated_group_size", "workers", "balance_window")
        if self.path == "":
            raise ConfigError("data.path is empty; set a file, or null for generated rollouts")
        if self.tokenizer == "bytes":
            needed = "under data.tokenizer=bytes; set data.tokenizer=hf"
            without_effect(self, "data", needed, "tokenizer_path", "chat_template_kwargs")
        if self.tokenizer == "hf" and self.path is None:
            raise ConfigError(
                "data.tokenizer=hf needs data.path, because generated rollouts are bytes; set it"
            )
        if self.num_generated % self.generated_group_size:
            raise ConfigError(
                f"data.num_generated={self.num_generated} is not a multiple of data."
                f"generated_group_size={self.generated_group_size}; set one"
            )
