"""Settings of Megatron's config that hold during one call of its schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def pipeline_settings(
    *, pp: int, vpp: int, variable: bool, keeps_outputs: bool = True
) -> dict[str, Any]:
    """Settings with which pipeline stages exchange the right tensors, and no more than these.

    Args:
        variable: rows may differ in length.
        keeps_outputs: interleaved stages keep their outputs' memory, whatever the config says.
            Sends overlap with the next forward: Megatron-Core before 0.18 frees an output while
            its send still reads it; later versions wait for the send, which ends the overlap.
            Without interleaving each send is waited for, and the setting is the user's.
    """
    settings: dict[str, Any] = {
        "variable_seq_lengths": variable and pp > 1,
        # After an exchange Megatron also synchronizes the device, against a race in old
        # versions of torch. Waiting for the requests already orders the streams.
        "batch_p2p_sync": False,
    }
    if vpp > 1 and keeps_outputs:
        settings["deallocate_pipeline_outputs"] = False
    return settings


@contextlib.contextmanager
def config_with(config: Any, overrides: dict[str, Any]) -> Iterator[None]:
    """Within the block, Megatron's config has the call's settings instead of the user's."""
    before = {name: getattr(config, name) for name in overrides}
    for name, value in overrides.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
