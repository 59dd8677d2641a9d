"""Imports of Megatron-Bridge's adapters and of the peft package, from releases of their own."""

from __future__ import annotations

import sys
import types
from typing import Any

from tools.hosting import sources

# Last, peft's own dependencies that are not in every test environment.
PEFT = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.1.0")


def install() -> None:
    """Install both into folders of their own.

    Raises:
        tools.hosting.sources.NoSource: one cannot be installed.
    """
    for requirement in (*PEFT, sources.release("megatron_bridge")):
        sources.installed(requirement)


def add_peft() -> None:
    """Put the peft package on the import path."""
    sys.path += [str(sources.installed(requirement)) for requirement in PEFT]


def add_bridge() -> None:
    """Let `megatron.bridge` be imported without the models that its package imports."""
    folder = sources.installed(sources.release("megatron_bridge"))
    package = types.ModuleType("megatron.bridge")
    package.__path__ = [str(folder / "megatron" / "bridge")]
    sys.modules[package.__name__] = package


def lora(**settings: Any) -> Any:
    """Bridge's LoRA with these settings."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(**settings)
