"""A batch of samples as ragged fields: the input of packed rows.

A field has one value per token of its sample (a mask, log-probs, advantages), or one per sample.
Frameworks keep fields ragged or padded to [B, S]; both are accepted. Images
that megapack encodes are `ImageRef`s. Other tensors, and images that the model itself encodes, are
a `TensorField`: they follow their sample into its micro-batch, and the model's forward receives
them as keyword arguments.

    batch = SampleBatch(tokens, fields, tensors={"pixels": TensorField(images)})
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapack.base.arrays import MAX_LENGTH
from megapack.errors import DataError, brief
from megapack.images import ImageRef, Images, checked_images, images_digest, is_image_token
from megapack.samples.padded import padded_spans, ragged_values
from megapack.samples.tensor_fields import RaggedTensor, RowTensor, TensorField, as_tensor

RESPONSE_MASK = "response_mask"
"""Field that marks the tokens that count in the loss."""


class SampleBatch:
    """The samples of a batch, unpadded, with the fields that objectives read.

        batch = SampleBatch([[5, 6, 7], [5, 6]], {"response_mask": [[0, 0, 1], [0, 1]]})
        plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)

    Their order is the plan's: sample i of the plan is sample i here. `from_prompt_response`,
    `from_padded` and `from_lengths` make batches from other forms.

    Args:
        tokens: per sample its token ids, at least one: list, array or 1-d integer tensor.
        fields: by name one entry per sample: a number, [tokens], or [response tokens]. The
            response is the sample's last tokens; the others get 0. An entry may have k numbers per
            token: [tokens, k]. `response_mask` marks the tokens that count in the loss; without it
            all do. A sample's first token never counts: nothing predicts it.
        tensors: by name what else the model's forward takes.
        images: per sample its `ImageRef`s. Image tokens never count in the loss, and a mask in
            which one does is refused.

    Raises:
        DataError: an input is invalid; the message gives sample, field and numbers.
    """

    def __init__(
        self,
        tokens: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        tensors: Mapping[str, TensorField] | None = None,
        images: Sequence[Sequence[ImageRef]] | None = None,
    ) -> None:
        if not isinstance(tokens, Sized):
            raise DataError(f"tokens are {brief(tokens)}; give the ids of each sample")
        if len(tokens) == 0:
            raise DataError("the batch has no samples; give at least 1")
        self._tokens = {i: _token_tensor(i, ids) for i, ids in enumerate(tokens)}
        self._lengths = [t.numel() for t in self._tokens.values()]
        self._images = checked_images(images, self._lengths)
        self._fields: dict[str, list[Tensor]] = {}
        self._num_loss_tokens: list[int] | None = None
        # Samples of which only the number of loss tokens is known so far.
        self._unmasked: set[int] = set()
        self.revision = 0
        """Number of changes so far; data derived from an older revision is stale."""
        for name, values in (fields or {}).items():
            self.set_field(name, values)
        self._tensors = {
            name: RaggedTensor(name, values, len(self)) for name, values in (tensors or {}).items()
        }

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample: the input of the planner."""
        return self._lengths

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the fields without the response mask."""
        return tuple(name for name in self._fields if name != RESPONSE_MASK)

    def length(self, sample: int) -> int:
        """Tokens of one sample."""
        return self._lengths[sample]

    def tokens(self, sample: int) -> Tensor:
        """Token ids of one sample, int64.

        Raises:
            DataError: the batch was made by `from_lengths` and the sample's tokens were not set.
        """
        if sample not in self._tokens:
            raise DataError(f"sample {sample} has no tokens on this rank; call set_tokens first")
        return self._tokens[sample]

    def set_tokens(self, sample: int, prompt: Any, response: Any, loss_mask: Any = None) -> None:
        """Set the tokens of one sample of a batch made by `from_lengths`.

            for i in own_samples([plan], adapter.dp_rank):
                batch.set_tokens(i, prompts[i], responses[i])

        Args:
            sample: index of the sample.
            prompt, response: its token ids, as many as the batch has for them.
            loss_mask: per response token 0 or 1, whether it counts in the loss; None: all do.

        Raises:
            DataError: other numbers of tokens, or of tokens that count, than the batch has.
        """
        prompt_ids = _part(sample, prompt)
        response_ids = _part(sample, response)
        tokens = _token_tensor(sample, torch.cat([prompt_ids, response_ids]))
        if tokens.numel() != self.length(sample):
            raise DataError(
                f"sample {sample} has {tokens.numel()} tokens, its length in the batch is "
                f"{self.length(sample)}; give that many"
            )
        if loss_mask is not None or sample in self._unmasked:
            self._set_mask(sample, prompt_ids, response_ids, loss_mask)
        self._tokens[sample] = tokens
        self.revision += 1

    def _set_mask(self, sample: int, prompt: Tensor, response: Tensor, loss_mask: Any) -> None:
        mask = ~self._image_tokens(sample)[prompt.numel() :]
        if loss_mask is not None:
            mask = as_tensor(f"sample {sample}: loss_mask", loss_mask) != 0
        if mask.shape != response.shape:
            raise DataError(
                f"sample {sample}: loss_mask has shape {tuple(mask.shape)} for a response of "
                f"{response.numel()} tokens; give one value per token of the response"
            )
        whole = torch.cat([prompt.new_zeros(prompt.numel(), dtype=torch.bool), mask])
        self._check_mask(sample, whole)
        count = int(whole[1:].sum())
        if count != self.num_loss_tokens[sample]:
            raise DataError(
                f"sample {sample}: {count} tokens count in the loss, in the batch "
                f"{self.num_loss_tokens[sample]} do, which all ranks have planned with; give the "
                "mask of that sample"
            )
        self._fields[RESPONSE_MASK][sample] = whole
        self._unmasked.discard(sample)

    def field(self, name: str, sample: int) -> Tensor:
        """A field of one sample: one value per token ([tokens] or [tokens, k]), or a scalar."""
        return self._fields[name][sample]

    def is_wide(self, name: str) -> bool:
        """Whether a field has k numbers per token in place of one."""
        return any(values.dim() > 1 for values in self._fields[name])

    def field_dtype(self, name: str) -> torch.dtype:
        """The dtype of a field in packed rows."""
        return self._fields[name][0].dtype

    def images(self, sample: int) -> Images:
        """The images of one sample, in order."""
        return self._images[sample]

    @functools.cached_property
    def has_images(self) -> bool:
        """Whether a sample has an image."""
        return any(self._images)

    @functools.cached_property
    def image_signature(self) -> str:
        """A digest of the images' places and keys; must be equal on all ranks."""
        return images_digest(self._images)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensor fields."""
        return tuple(self._tensors)

    def row_tensors(
        self, samples: Sequence[int], trees: Sequence[Sequence[int]] = ()
    ) -> dict[str, RowTensor]:
        """The tensor fields of a micro-batch's samples, each combined as declared.

        Args:
            trees: indices into `samples` of those that share a beginning.

        Raises:
            DataError: samples that share a beginning have different tensors, or tensors that are
                not declared as those of the beginning.
        """
        return {name: tensor.row(samples, trees) for name, tensor in self._tensors.items()}

    @property
    def tensor_signature(self) -> str:
        """Names, dtypes and shapes of the tensor fields; must be equal on all ranks."""
        return "; ".join(tensor.signature for tensor in self._tensors.values())

    def response_mask(self, sample: int) -> Tensor:
        """bool per token of a sample: whether it counts in the loss.

        Raises:
            DataError: the batch knows only their number so far, see `from_lengths`.
        """
        if sample in self._unmasked:
            raise DataError(f"sample {sample} has no mask on this rank; call set_tokens first")
        if RESPONSE_MASK not in self._fields:
            return ~self._image_tokens(sample)
        return self._fields[RESPONSE_MASK][sample]

    @property
    def num_loss_tokens(self) -> list[int]:
        """Tokens of each sample that count in the loss (its first token never does)."""
        if self._num_loss_tokens is None:
            self._num_loss_tokens = [int(self.response_mask(i)[1:].sum()) for i in range(len(self))]
        return self._num_loss_tokens

    def set_field(self, name: str, values: Sequence[Any]) -> None:
        """Add or replace a field.

        Args:
            name: of the field, such as "advantages" or "old_logprobs".
            values: one entry per sample, as in the constructor.

        Raises:
            DataError: another number of entries, or an entry of another shape or not finite.
        """
        if not isinstance(values, Sized):
            raise DataError(f"field {name!r} is {brief(values)}; give a value per sample")
        if len(values) != len(self):
            raise DataError(
                f"field {name!r} has {len(values)} values for {len(self)} samples; give one per "
                "sample"
            )
        tensors = [self._field_tensor(name, i, value) for i, value in enumerate(values)]
        per_token = [i for i, tensor in enumerate(tensors) if tensor.dim()]
        for i in per_token:
            first = per_token[0]
            if tensors[i].shape[1:] != tensors[first].shape[1:]:
                raise DataError(
                    f"sample {first}: field {name!r} has shape {tuple(tensors[first].shape)}, "
                    f"sample {i} has {tuple(tensors[i].shape)}; give equally many numbers per token"
                )
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        self._fields[name] = [t.to(dtype) for t in tensors]
        self.revision += 1
        if name == RESPONSE_MASK:
            self._num_loss_tokens = None
            self._unmasked.clear()

    def _field_tensor(self, name: str, sample: int, value: Any) -> Tensor:
        tensor = as_tensor(f"sample {sample}: field {name!r}", value)
        length = self.length(sample)
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        if tensor.is_complex():
            raise DataError(f"sample {sample}: field {name!r} is {tensor.dtype}; give real numbers")
        if tensor.is_floating_point() and not (is_finite := torch.isfinite(tensor)).all():
            place = f" at {(~is_finite).nonzero()[0].tolist()}" if tensor.dim() else ""
            raise DataError(
                f"sample {sample}: field {name!r} holds {tensor[~is_finite][0].item()}{place}; "
                "give finite numbers, or drop the sample"
            )
        if name == RESPONSE_MASK:
            tensor = tensor != 0
            if tensor.dim() != 1:
                raise DataError(
                    f"sample {sample}: {name} is {brief(value)}; give one value per token"
                )
        if tensor.dim() == 0:
            return tensor
        if tensor.dim() > 2 or tensor.shape[0] > length:
            raise DataError(
                f"sample {sample}: field {name!r} has shape {tuple(tensor.shape)} for {length} "
                "tokens; give one value per token, per response token, or one number"
            )
        rest = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
        whole = torch.cat([rest, tensor])
        if name == RESPONSE_MASK:
            self._check_mask(sample, whole)
        return whole

    def _image_tokens(self, sample: int) -> Tensor:
        """bool per token of a sample: whether an image stands there."""
        return torch.from_numpy(is_image_token(self._images[sample], self.length(sample)))

    def _check_mask(self, sample: int, mask: Tensor) -> None:
        trained = (mask & self._image_tokens(sample)).nonzero()
        if trained.numel():
            raise DataError(
                f"sample {sample}: {RESPONSE_MASK} counts token {int(trained[0])}, which is an "
                "image's; give 0 there"
            )

    @classmethod
    def from_prompt_response(
        cls,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        tensors: Mapping[str, TensorField] | None = None,
        images: Sequence[Sequence[ImageRef]] | None = None,
    ) -> SampleBatch:
        """A batch from prompts and responses; the responses count in the loss, without images.

            batch = SampleBatch.from_prompt_response(
                [[5, 6], [5, 6]], [[7, 8, 9], [7]], {"advantages": [0.5, -0.5]}
            )

        Args:
            prompts, responses: per sample its token ids, unpadded: list or 1-d integer tensor.
            fields, tensors, images: as in the constructor.

        Raises:
            DataError: an invalid entry; the message names the sample and what to give.
        """
        if len(prompts) != len(responses):
            raise _unpaired(prompts, responses)
        pairs = [
            (_part(i, p), _part(i, r))
            for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
        ]
        batch = cls([torch.cat(pair) for pair in pairs], tensors=tensors, images=images)
        batch._set_fields([len(prompt) for prompt, _ in pairs], fields)
        return batch

    def _set_fields(
        self, prompt_tokens: Sequence[int], fields: Mapping[str, Sequence[Any]] | None
    ) -> None:
        """Set masks by which responses count, without images, and the given fields."""
        masks = [~self._image_tokens(sample) for sample in range(len(self))]
        for mask, num_prompt in zip(masks, prompt_tokens, strict=True):
            mask[:num_prompt] = False
        for name, values in {RESPONSE_MASK: masks, **(fields or {})}.items():
            self.set_field(name, values)

    @classmethod
    def from_lengths(
        cls,
        prompt_tokens: Sequence[int],
        response_tokens: Sequence[int],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        loss_tokens: Sequence[int] | None = None,
        images: Sequence[Sequence[ImageRef]] | None = None,
    ) -> SampleBatch:
        """A batch of lengths alone, for ranks that hold only their own samples' tokens.

            batch = SampleBatch.from_lengths([512, 512], [1800, 90])

        Lengths are enough for plans and loss weights. A rank sets the tokens of its own samples
        with `set_tokens` before the step.

        Args:
            prompt_tokens, response_tokens: per sample the number of tokens, 0 or more.
            fields: as in the constructor.
            loss_tokens: per sample the response tokens that count in the loss; None: all. A
                sample's first token never counts. All ranks weight the loss by these numbers;
                where fewer than all count, `set_tokens` must give the mask.
            images: as in the constructor; pixels are asked for on the ranks that encode them.

        Raises:
            DataError: a number that is not an integer of at least 0, or an invalid field.
        """
        if len(prompt_tokens) != len(response_tokens):
            raise _unpaired(prompt_tokens, response_tokens)
        if len(prompt_tokens) == 0:
            raise DataError("the batch has no samples; give at least 1")
        batch = cls([[0]])
        batch._tokens = {}
        pairs = zip(prompt_tokens, response_tokens, strict=True)
        batch._lengths = [_checked_length(sample, *pair) for sample, pair in enumerate(pairs)]
        batch._images = checked_images(images, batch._lengths)
        batch._set_fields(prompt_tokens, fields)
        if loss_tokens is not None:
            batch._set_loss_tokens(loss_tokens)
        return batch

    def _set_loss_tokens(self, counts: Sequence[int]) -> None:
        most = self.num_loss_tokens
        if len(counts) != len(most):
            raise DataError(f"{len(counts)} loss_tokens for {len(most)} samples; give one each")
        for sample, count in enumerate(counts):
            if not isinstance(count, int | np.integer) or not 0 <= count <= most[sample]:
                raise DataError(
                    f"sample {sample} has {brief(count)} loss_tokens; give 0 to {most[sample]}, "
                    "the tokens of its response"
                )
        self._unmasked = {i for i, count in enumerate(counts) if count != most[i]}
        self._num_loss_tokens = [int(count) for count in counts]

    @classmethod
    def from_padded(
        cls,
        input_ids_BS: Tensor,
        attention_mask_BS: Tensor,
        fields: Mapping[str, Tensor] | None = None,
    ) -> SampleBatch:
        """A batch from left- or right-padded tensors with an attention mask.

            batch = SampleBatch.from_padded(input_ids, attention_mask, {"response_mask": mask})

        Args:
            input_ids_BS: token ids [B, S].
            attention_mask_BS: [B, S], nonzero at real tokens: one unbroken run per sample.
            fields: by name [B], [B, S], or [B, R] for the last R columns.

        Raises:
            DataError: shapes differ, a sample is empty, or a mask has a hole.
        """
        if input_ids_BS.dim() != 2 or input_ids_BS.shape != attention_mask_BS.shape:
            raise DataError(
                f"input_ids {tuple(input_ids_BS.shape)} and attention_mask "
                f"{tuple(attention_mask_BS.shape)} must both be [B, S]; give tensors of one shape"
            )
        spans = padded_spans(attention_mask_BS)
        ragged = {
            name: ragged_values(name, value, spans, input_ids_BS.shape[1])
            for name, value in (fields or {}).items()
        }
        rows = zip(input_ids_BS, spans, strict=True)
        return cls([ids[start:stop] for ids, (start, stop) in rows], ragged)


def _token_tensor(sample: int, ids: Any) -> Tensor:
    tensor = as_tensor(f"sample {sample}", ids)
    if tensor.numel() == 0 and tensor.dim() == 1:
        raise DataError(f"sample {sample} has no tokens; leave it out of the batch")
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not integers or tensor.dim() != 1:
        raise DataError(
            f"sample {sample}: token ids are {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "give one integer per token"
        )
    tensor = tensor.to(torch.int64)
    if int(tensor.min()) < 0:
        raise DataError(
            f"sample {sample} has the negative token id {int(tensor.min())}; give ids of 0 or more"
        )
    return tensor


def _unpaired(prompts: Sequence[Any], responses: Sequence[Any]) -> DataError:
    return DataError(
        f"{len(prompts)} prompts for {len(responses)} responses; give a response to each prompt"
    )


def _checked_length(sample: int, prompt: int, response: int) -> int:
    for count in (prompt, response):
        if not isinstance(count, int | np.integer) or not 0 <= count <= MAX_LENGTH:
            raise DataError(
                f"sample {sample} has a prompt or response of {brief(count)} tokens; give 0 to "
                f"{MAX_LENGTH}"
            )
    if prompt + response < 1:
        raise DataError(f"sample {sample} has no tokens; leave it out of the batch")
    return prompt + response


def _part(sample: int, ids: Any) -> Tensor:
    """Token ids of a prompt or response; unlike a sample it may be empty."""
    tensor = as_tensor(f"sample {sample}", ids)
    is_empty = tensor.numel() == 0
    return tensor.new_zeros(0, dtype=torch.int64) if is_empty else _token_tensor(sample, tensor)
