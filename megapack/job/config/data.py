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
    """A file of JSON Lines (see `megapack.job.data.rollouts`) or Parquet with the same columns, or
    a folder of such files, read as one; null = generated rollouts."""
    prompts_per_batch: int = 32
    """Prompt groups (prompts with all their rollouts) per batch; a batch is planned as a whole."""
    max_length: int | None = None
    """Tokens that a sample may have, prompt and response; null = model.max_position_embeddings."""
    overlong: Overlong = "error"
    """What happens to a sample above `max_length`: raise an error, truncate it to its first tokens,
    or skip it with a warning. A truncated sample with no token left that counts in the loss is
    skipped."""
    tokenizer: Literal["bytes", "hf"] | None = None
    """For text and chats: bytes (one token per byte, 259 with the special tokens; no chats), or hf
    (the tokenizer and chat template of a Hugging Face folder, read by transformers). Token ids in a
    file are used as they are. null = hf if `tokenizer_path` or model.hf_path is set, else bytes.
    Generated rollouts are bytes."""
    tokenizer_path: str | None = None
    """The folder with `tokenizer.json` for the text of `path`; null = model.hf_path."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Arguments of the chat template by name, such as {enable_thinking: false}; a line's own
    `chat_template_kwargs` come before them. One that the template does not read is refused."""
    workers: int | None = None
    """Processes of a node that tokenize the data before its first run; null = one per core. The
    result is the same with any number."""
    num_generated: int = 256
    """Rollouts, or under dpo and reward preference pairs, to generate if `path` is null; a multiple
    of `generated_group_size`."""
    generated_group_size: int = 4
    """Generated rollouts or pairs per prompt."""
    generated_seed: int = 0
    """Equal seeds generate equal rollouts."""
    shuffle: bool = False
    """Shuffle the prompt groups in each epoch, by `seed`."""
    balance_window: int = 1
    """Consecutive batches that exchange prompt groups until their work is about equal; 1 = none do,
    and from the number of an epoch's batches on, all of them do. Work is by the model's sizes. A
    batch keeps its number of prompt groups."""
    drop_equal_rewards: bool = False
    """Leave out prompt groups whose rewards are all equal, as DAPO's dynamic sampling does
    (arXiv 2503.14476): advantages relative to the group give them no gradient. Under advantage_norm
    reinforce++, which is relative to the batch, they would have one and change that of others; with
    none or a critic it is refused. Batches are filled with the groups that follow. Rewards count as
    they are in the file. Groups of one rollout, and groups with given advantages, are kept."""

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
