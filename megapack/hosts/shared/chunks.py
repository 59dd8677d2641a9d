"""The chunks of virtual stages as one module, for hosts whose workers keep one model per rank."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from megatron.core.distributed import DistributedDataParallel

from megapack.errors import ConfigError


class OneModel(DistributedDataParallel):  # type: ignore[misc]
    """A rank's chunks, each in Megatron's DDP, in place of the one that a host knows.

    What the host does to its model reaches every chunk. Functions that take lists of chunks get
    them by `in_lists`.

    Args:
        chunks: of this rank, in their order.
    """

    def __init__(self, chunks: list[Any]) -> None:
        # DDP's own would make gradient buffers of all chunks again.
        torch.nn.Module.__init__(self)
        self.chunks = torch.nn.ModuleList(chunks)
        # Chunks have hooks together or not at all.
        for name in ("config", "ddp_config", "remove_forward_pre_hook_handles"):
            setattr(self, name, getattr(chunks[0], name))
        for name in ("buffers", "expert_parallel_buffers"):
            setattr(self, name, [*chain.from_iterable(getattr(chunk, name) for chunk in chunks)])
        for name in ("zero_grad_buffer", "enable_forward_pre_hook", "disable_forward_pre_hook"):
            setattr(self, name, partial(self._on_each, name))

    def _on_each(self, name: str, *args: Any, **kwargs: Any) -> None:
        for chunk in self.chunks:
            getattr(chunk, name)(*args, **kwargs)

    @property
    def module(self) -> Any:
        """The first chunk's, by which hosts tell what class their model has."""
        return self.chunks[0].module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Tensors by name, after the number of the chunk: each numbers its layers from 0."""
        dicts = enumerate(chunk.state_dict(*args, **kwargs) for chunk in self.chunks)
        return {f"{number}.{name}": value for number, own in dicts for name, value in own.items()}

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: chunks run in Megatron's schedule."""
        what = f"{len(self.chunks)} chunks run in Megatron's schedule only, and not in this call"
        raise ConfigError(f"{what}; set virtual_pipeline_model_parallel_size=null")

    # By this a host opens a step of several calls, whose gradients it finishes itself.
    no_sync = forward


def in_lists(models: Any) -> list[Any]:
    """A list of models with chunks in place of each `OneModel` that has them."""
    models = models if isinstance(models, list) else [models]
    return [*chain.from_iterable(getattr(model, "chunks", [model]) for model in models)]
