"""Harmless warnings of Megatron-Core and torch."""

from __future__ import annotations

import functools
import logging
import warnings

# Module of Megatron-Core -> start of a warning that it logs since 0.19, for every model. GPTModel
# gets no new features; and DDP computes a layout that Megatron-LM's training loop passes in.
LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param",
}


def quiet_known_warnings() -> None:
    """Silence harmless warnings of Megatron-Core and torch, which every rank would print at import.

    They are about optional packages, deprecated names that Megatron-Core still uses, and its plans.
    """
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"full scope is deprecated",
        r"The \.grad attribute of a Tensor that is not a leaf",
        r"`torch\.distributed\.\w+_tensor` is deprecated",
        r"If you are using transformer_engine as the transformer implementation",
        r"The following imports from `dynamic_context\.py`",
        r"The 'megatron\.core\.transformer\.custom_layers",
        r"Using deprecated internal API from Transformer Engine",
        r"transformer_engine\.[\w.]+ is deprecated",
        r"`load_state_dict` is deprecated",
        r"absl\.logging is not installed",
        r"MimoModelConfig is experimental",
    ):
        warnings.filterwarnings("ignore", message=message)
    for module, start in LOGGED.items():
        logging.getLogger(module).addFilter(functools.partial(_starts_otherwise, start))


def _starts_otherwise(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
