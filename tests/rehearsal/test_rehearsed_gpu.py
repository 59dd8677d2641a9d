"""The pretended GPU: torch's varlen attention, and what a process is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack.cpu.te import KernelFault
from tests.marks import needs_te
from tests.packed_attention import sample_attention
from tests.rehearsal import gpu
from tests.te_python import te_folder

pytestmark = pytest.mark.unit

LENGTHS = [3, 1, 6]
FACTS = """
import json, torch
from megapack import cpu, launch
from megapack.model.attention.choice import find_kernels
device = launch.start("cuda")
kernels = find_kernels()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.max_memory_allocated()
torch.ones(16 << 20, device=device).sum()
print(json.dumps({
    "available": torch.cuda.is_available(), "uses_cuda": cpu.uses_cuda(), "device": str(device),
    "pinned": str(torch.empty(2, pin_memory=True).pin_memory().device),
    "kernels": str(kernels)[:37],
    "peak_mib": (torch.cuda.max_memory_allocated() - before) >> 20,
}))
"""


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of the kernel: 10 tokens, 4 heads over 2 groups of 8 channels."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(10, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    given = {"query": query, "key": key, "value": value, "cu_seq_q": ends, "cu_seq_k": ends}
    options = {"max_q": 6, "max_k": 6, "window_size": (-1, 0), "enable_gqa": True}
    return {**given, **options, **changes}


def test_varlen_attention_is_that_of_each_sample() -> None:
    given = arguments()
    wide = [given[name].double() for name in ("query", "key", "value")]
    expected = sample_attention(*wide, LENGTHS, 8**-0.5)
    out = gpu.varlen_attention(**given)
    torch.testing.assert_close(out.double(), expected, atol=0.01, rtol=0.01)


def test_the_last_query_sees_the_last_key() -> None:
    whole = gpu.varlen_attention(**arguments())
    given = arguments(max_q=2)
    last = torch.tensor([1, 2, 3, 8, 9])
    ends = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    out = gpu.varlen_attention(**{**given, "query": given["query"][last], "cu_seq_q": ends})
    torch.testing.assert_close(out, whole[last])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"query": torch.zeros(10, 4, 8)}, "bf16 or fp16"),
        ({"cu_seq_q": torch.tensor([0, 3, 4, 10])}, "not int32"),
        ({"cu_seq_k": torch.tensor([0, 3, 4, 9], dtype=torch.int32)}, "of 10 tokens"),
        ({"max_q": 5}, "the bound is 5"),
        ({"max_k": torch.tensor(6)}, "not int"),
        ({"enable_gqa": False}, "need enable_gqa"),
        ({"window_size": (-1, -1)}, "only causal"),
    ],
)
def test_what_the_kernel_takes_for_granted_is_checked(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(KernelFault, match=fault):
        gpu.varlen_attention(**arguments(**changes))


@needs_te
def test_a_process_takes_the_branches_of_a_gpu(repo_root: Path) -> None:
    startup = repo_root / "tests" / "rehearsal" / "startup"
    path = os.pathsep.join(map(str, (repo_root, startup, te_folder())))
    done = subprocess.run(
        [sys.executable, "-c", FACTS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("peak_mib") >= 64
    assert found == {
        **{"available": True, "uses_cuda": True, "device": "cuda:0", "pinned": "cpu"},
        "kernels": "attention te, norms te, Adam te, grad",
    }
