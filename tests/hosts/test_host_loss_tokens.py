"""slime's and miles' loss functions, with stubs in place of the hosts'."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.hosts import miles, slime

pytestmark = pytest.mark.hosts

# Samples with 2, 0 and 1 loss tokens; the hosts count 4.
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([0, 0]), torch.tensor([1])]
HOSTS = {
    "slime": ("slime.backends.megatron_utils.loss", slime.loss_function, (5, 16, "logits")),
    "miles": ("miles.backends.training_utils.loss", miles.loss_function, (5, "logits", True, 16)),
}


@pytest.fixture(params=sorted(HOSTS))
def loss_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A host's patched loss of these masks; the host's own notes what it was called with."""
    name, function, others = HOSTS[request.param]
    module = types.ModuleType(name)

    def own(args: Any, batch: Any, *given: Any, **named: Any) -> Any:
        assert (*given, *named.values()) == others
        counts = sum(torch.clamp_min(mask.sum(), 1) for mask in batch["loss_masks"])
        count = counts if args.calculate_per_token_loss else torch.tensor(1)
        values = torch.tensor([float(count), 6.0])
        return torch.tensor(6.0), count, {"keys": ["loss"], "values": values}

    module.loss_function = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)

    def loss(masks: list[torch.Tensor], *, per_token: bool) -> Any:
        args = SimpleNamespace(calculate_per_token_loss=per_token)
        return function(args, {"loss_masks": masks}, *others)

    return loss


def test_a_step_without_any_loss_token_can_be_reported(loss_of: Callable[..., Any]) -> None:
    _, num_tokens, logged = loss_of([MASKS[1], MASKS[1]], per_token=True)
    assert int(num_tokens) == 0
    assert 0.0 / logged["values"][0].item() == 0.0
