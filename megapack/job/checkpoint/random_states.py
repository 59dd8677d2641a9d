"""The random states of a rank: torch's, CUDA's, and those of Megatron's tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """This rank's random states by name: torch's, CUDA's, and those of Megatron's tracker."""
    tracked = {f"tracker.{k}": _plain(v) for k, v in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(), **tracked}


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Restore what `rng_state` returned on this rank of the same layout."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, now in states.items():
        value = state[f"tracker.{name}"]
        if isinstance(now, torch.Generator):
            now.set_state(value)
        else:
            states[name] = value
    tracker.set_states(states)


def _plain(state: Any) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state
