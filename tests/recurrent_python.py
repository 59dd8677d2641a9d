"""Kernels of recurrent layers in Triton's interpreter; `tools/recurrent_python.sh` brings them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

FOLDER = Path(__file__).resolve().parents[1] / ".recurrent"

_is_complete = (FOLDER / "causal_conv1d").is_dir() and (
    (FOLDER / "triton").is_dir() or importlib.util.find_spec("triton") is not None
)
needs_recurrent = pytest.mark.skipif(
    not _is_complete, reason="kernels of recurrent layers are absent: tools/recurrent_python.sh"
)


def interpret() -> None:
    """Prepare this process, which has not imported Triton, to run the kernels on the CPU."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def with_one_config(
        self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **kw: Any
    ) -> None:
        # The choice among several would time them on a GPU.
        init(self, fn, names, configs[:1], *rest, **kw)

    Autotuner.__init__ = with_one_config
    # mamba_ssm asks for them around its kernels.
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)
    import fla.ops.common.chunk_delta_h
    import triton.language as tl

    def counted(*args: Any) -> Iterator[Any]:
        # The kernels call methods of a loop's counter, which is a plain number in the interpreter.
        for k in range(*args):
            yield tl.full((), k, tl.int32)

    vars(fla.ops.common.chunk_delta_h)["range"] = counted


def with_reference_of_causal_conv1d() -> None:
    """causal_conv1d's function is its reference by torch; the package has compiled kernels only."""
    # The compiled parts of the package and of mamba_ssm, which are named when they are imported.
    for name in ("causal_conv1d_cuda", "selective_scan_cuda"):
        sys.modules[name] = mock.MagicMock(spec=ModuleType)
    import causal_conv1d

    reference = causal_conv1d.causal_conv1d_interface.causal_conv1d_ref

    def checked(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses what `causal_conv1d_fwd` of csrc/causal_conv1d.cpp refuses."""
        assert x.stride(1) == 1, "not channel-last"
        assert all(n % 8 == 0 for n in (x.shape[1], x.stride(0), x.stride(2)))
        assert weight.shape == (x.shape[1], 4)
        return reference(x, weight, *args, **kwargs)

    causal_conv1d.causal_conv1d_fn = checked
