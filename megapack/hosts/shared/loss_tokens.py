"""What slime and miles divide by under `calculate_per_token_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Far below the resolution of a sum of counts, and above zero: a step without any loss token reports
# a loss of 0 instead of dividing by 0.
_NOT_ZERO = 1e-30


def without_empty_samples(args: Any, result: Any, loss_masks: Sequence[Any]) -> Any:
    """A host's loss, under `args.calculate_per_token_loss` divided by the number of loss tokens.

    Both hosts count a sample without loss tokens as one token. Three samples with 5, 0 and 3 loss
    tokens give 9 instead of 8: the loss and its gradient are 8/9 of what they should be.

    Args:
        result: what the host's `loss_function` returns: the sum of losses, the number of tokens,
            and a dict whose `values` begin with that number.
        loss_masks: of the micro-batch's samples, [response] each.

    Returns:
        The same with the corrected numbers. The sum of losses is the host's.
    """
    if not args.calculate_per_token_loss:
        return result
    # Imported here: the planners of both hosts do without torch.
    import torch

    loss, num_tokens, logged = result
    # On the device: a number on the host would wait for it.
    num_empty = torch.stack([mask.sum() == 0 for mask in loss_masks]).sum()
    values = logged["values"].clone()
    values[0] = (values[0] - num_empty).clamp(min=_NOT_ZERO)
    return loss, num_tokens - num_empty, {**logged, "values": values}
