"""Whether the installed Transformer Engine imports."""

from __future__ import annotations

import importlib.util

from megapack.errors import ConfigError, one_line


def refuse_broken_te() -> None:
    """Check that an installed Transformer Engine imports, or fails in a way that Megatron expects.

    Call it before importing Megatron-Core, which goes on without Transformer Engine after an
    ImportError only. Without cuDNN, on a login node for example, the import raises a RuntimeError.

    Raises:
        ConfigError: `import megatron.core` would fail; says why.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return
    except Exception as error:  # a missing library, or versions that do not fit
        raise ConfigError(
            f"transformer_engine is installed and does not import ({type(error).__name__}: "
            f"{one_line(error)}), and Megatron-Core not without it; install what it misses (cuDNN: "
            "pip install nvidia-cudnn-cu13, or -cu12), or pip uninstall transformer-engine"
        ) from error
