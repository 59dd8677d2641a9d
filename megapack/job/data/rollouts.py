"""Rollouts: their JSON Lines format and their batches.

A line is one sample, or several. Its tokens come from one of these sets of columns:

    {"prompt": "2+2=", "response": "4"}
    {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}
    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}

- `prompt` and `response`: text, each encoded by itself (`data.tokenizer`). The prompt gets the
  tokens that begin a sample, if the tokenizer has any (BOS), the response the one that ends it
  (EOS); a text that has them already gets no second;
- `prompt_ids` and `response_ids`: token ids, used unchanged;
- `response_mask` or `loss_mask`: one 0 or 1 per response id, whether it counts in the loss: 0 for
  what a tool or the environment wrote. Without it all count;
- `routed_experts`: per token id of prompt and response, or of all but the last, the experts that
  the router chose, [MoE layers][k];
- `rollout_logprobs`, `teacher_logprobs`: per response id its log-prob in nats, under the engine
  that sampled it and under a teacher. `teacher_topk_ids` and `teacher_topk_logprobs`: per response
  id [k], the ids that a teacher finds most likely there, and their log-probs. All samples of a data
  set have such a column, or none has;
- `messages`, and `tools` and `chat_template_kwargs` (a list and an object, or their JSON): a chat,
  written by the tokenizer's chat template, after `prompt` if it is given and not repeated.
  What the assistant's turns say counts, and the token that ends them; see `chats`. Not turns with a
  `weight`, `loss_mask`, `loss`, `train`, `training` or `trainable` of 0 or false. A template that
  rewrites earlier turns gives one sample for each turn that is rewritten later;
- `chosen` and `rejected`: a preference pair, two samples of one rollout, the preferred one first.
  Text after a text `prompt`, or messages: whole chats, or the turns after `prompt` (messages, or
  the text of the user's turn). Of chats only the turns from the first difference on count.
- `images`: a list of the images beside token ids, in the order of their runs of image tokens, each
  of which has one token per feature; beside chats, those of the parts {"type": "image"} that name
  none. An image is a path relative to the data file's folder, a data URI, or in Parquet bytes or
  {bytes, path}. Parts of messages are {"type": "image", "image": ...} or
  {"type": "image_url", "image_url": {"url": ...}}. See `images`.

Beside them, for all samples of the line:

- `group`: the prompt's identity (int or string, 1 and "1" differ). Samples of one prompt group
  answer the same prompt. Without it the line is a prompt group by itself;
- `rollout`: the rollout's identity inside its prompt group. Lines with the same group and rollout
  are fan-out samples of one rollout and stay in one optimizer step. Without it the line is a
  rollout by itself;
- `reward` or `advantage`: finite numbers; supervised training needs neither;
- `UNREAD_COLUMNS` are refused; other keys, and null, are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.errors import ConfigError
from megapack.job.data.balance import even_batches
from megapack.job.data.images.reader import SampleImage
from megapack.job.data.tokenizer import Ids, Mask

TOKEN_COLUMNS: dict[str, npt.DTypeLike] = {
    "rollout_logprobs": "<f4",
    "teacher_logprobs": "<f4",
    "teacher_topk_ids": "<i4",
    "teacher_topk_logprobs": "<f4",
}
"""Columns of values per response token, and the type that they are stored with."""
ROUTES = "routed_experts"
"""The column of a value per token of prompt and response."""
UNREAD_COLUMNS: dict[str, str] = {
    **dict.fromkeys(
        ("weight", "loss", "train", "loss_weight", "sample_weight", "loss_scale"),
        "all samples count alike: leave it out, or give messages a weight of 0 or 1",
    ),
    **dict.fromkeys(
        ("mask", "labels", "completion_mask", "assistant_masks", "train_on_inputs"),
        "give response_mask beside token ids, or messages a weight of 0 or 1",
    ),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "reasoning_effort", "documents"),
        "give arguments of the template as chat_template_kwargs",
    ),
    **dict.fromkeys(("system", "history"), "give it in messages"),
    **dict.fromkeys(("videos", "audios"), "only text and images are trained: leave the line out"),
    "image": "give images, a list",
    "functions": "give tools",
}
"""Columns that would change what is trained, and what to do instead: they are refused."""
TokenColumns = Mapping[str, npt.NDArray[Any]]
"""Values of such columns, [response tokens, ...] each."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sample of a rollout: a prompt and its response."""

    prompt_ids: Ids
    """Token ids of the prompt, may be empty. They are not trained on."""
    response_ids: Ids
    """Token ids of the response, may be empty. Prompt and response are never both empty."""
    reward: float | None = None
    """The sample's reward; None = not given."""
    advantage: float | None = None
    """An advantage to use unchanged; None = computed from rewards."""
    group: int | str
    """The prompt group: samples with equal values answer one prompt."""
    rollout: int | str
    """Samples with equal `(group, rollout)` are one rollout."""
    part: int = 0
    """Number of the sample within its line, from 0: a line may give several."""
    loss_mask: Mask | None = None
    """Per token of the response: whether it counts in the loss; None = all do."""
    pair_sign: int = 0
    """1 = the preferred response of a pair, -1 = the other one, 0 = no pair."""
    routed_experts: npt.NDArray[np.uint16] | None = None
    """The experts that each token was routed to, [tokens, MoE layers, k]; None = not given."""
    columns: TokenColumns = dataclasses.field(default_factory=dict)
    """Those of `TOKEN_COLUMNS` that are given."""
    images: tuple[SampleImage, ...] = ()
    """In the order of their tokens, none of which counts in the loss."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response, before any padding."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that count in the loss; a sample's first token never does."""
        first = 0 if len(self.prompt_ids) else 1
        if self.loss_mask is None:
            return max(len(self.response_ids) - first, 0)
        return int(self.loss_mask[first:].sum())

    @property
    def arrays(self) -> TokenColumns:
        """All arrays of values per token that are given: the columns and the routes."""
        routes = self.routed_experts
        return self.columns if routes is None else {**self.columns, ROUTES: routes}

    def cut(self, most: int) -> Rollout:
        """The first `most` tokens, with their mask, routes, columns and images; fewer if an image
        would be cut, or be last."""
        for image in reversed(self.images):
            if image.offset < most <= image.offset + image.tokens:
                most = image.offset
        prompt_ids = self.prompt_ids[:most]
        response_ids = self.response_ids[: most - len(prompt_ids)]
        mask = self.loss_mask
        routes = self.routed_experts
        return dataclasses.replace(
            self,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            loss_mask=None if mask is None else mask[: len(response_ids)],
            routed_experts=None if routes is None else routes[:most],
            columns={name: value[: len(response_ids)] for name, value in self.columns.items()},
            images=tuple(image for image in self.images if image.offset < most),
        )


def group_batches(
    group_of: npt.NDArray[np.int64],
    prompts_per_batch: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    work: npt.NDArray[np.int64] | None = None,
    window: int = 1,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield sample numbers in batches of whole prompt groups; the last batch may be smaller.

    The samples of a prompt group follow each other in file order. Prompt groups come in the order
    of their first sample, or are shuffled by `(seed, epoch)` alone, equally on every rank and
    machine. Then the full batches of each window exchange prompt groups, see `even_batches`; within
    a batch these keep their order.

    Args:
        group_of: int64 [samples], prompt groups numbered from 0 by first appearance.
        prompts_per_batch: prompt groups in a batch.
        work: int64 [samples], by which batches become even; None = none exchange groups.
        window: consecutive batches that do.
    """
    if prompts_per_batch < 1:
        raise ConfigError(f"data.prompts_per_batch is {prompts_per_batch}; set 1 or more")
    # Prompt groups are numbered by first appearance, so this order is also that of the files.
    samples = np.argsort(group_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group_of))])
    order = np.arange(len(starts) - 1)
    if shuffle:
        # NumPy keeps the raw bits of a bit generator stable across versions, but not `permutation`.
        keys = np.random.PCG64([seed, epoch]).random_raw(len(order))
        order = np.argsort(keys, kind="stable")
    if work is not None:
        group_work = np.add.reduceat(work[samples], starts[:-1])
        num_full = len(order) // prompts_per_batch
        # A view: the last batch stays as it is if it is short.
        full = order[: num_full * prompts_per_batch].reshape(num_full, prompts_per_batch)
        for first in range(0, num_full, window):
            own = full[first : first + window]
            own[:] = own.ravel()[even_batches(group_work[own])]
    for first in range(0, len(order), prompts_per_batch):
        chosen = order[first : first + prompts_per_batch]
        yield np.concatenate([samples[starts[g] : starts[g + 1]] for g in chosen])
