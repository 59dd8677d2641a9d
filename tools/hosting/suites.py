"""Which tests of a host's own run on megapack's functions, and what they need.

A suite is run unchanged, from the host's source tree, by `tools/host_suites.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Test files of a host."""

    host: str
    """Name of its patches, and in `sources.FOLDERS`."""
    tests: tuple[str, ...]
    """Test files below the source tree, or `file::Class`."""
    num_tests: int
    """How many there are, in the versions that the patches are for."""
    stubs: tuple[str, ...] = ()
    """Packages that its modules import and these tests do not need, if they are absent."""
    requirements: tuple[str, ...] = ()
    """Small releases of the package index that its modules need; installed without dependencies."""
    needs_device: bool = False
    """Whether its tests ask for a GPU: `megapack.cpu` serves them on a CPU over gloo."""
    known_failures: Mapping[str, str] = field(default_factory=dict)
    """Name of a test that fails on megapack's functions -> why that is right."""
    python_312: bool = False
    """Whether the host wants Python 3.12: below it, pydantic takes no `typing.TypedDict`."""


SUITES = (
    Suite(host="slime", tests=("tests/test_dp_schedule.py",), num_tests=9),
    Suite(
        host="miles",
        tests=(
            "tests/fast/utils/test_dp_schedule.py",
            "tests/fast/ray/rollout/test_train_data_conversion.py::TestSplitTrainDataByDpScheduled",
        ),
        num_tests=19,
        stubs=("ray", "sglang", "sglang_router", "httpx", "PIL", "omegaconf", "pybase64", "wandb"),
    ),
    Suite(
        host="nemo_rl",
        tests=(
            "tests/unit/job/data/packing/test_algorithms.py",
            "tests/unit/distributed/test_batched_data_dict.py",
        ),
        num_tests=99,
        stubs=(
            "ray",
            "requests",
            "PIL",
            "decord",
            "omegaconf",
            "datasets",
            "torchdata",
            "jaxtyping",
        ),
    ),
    Suite(
        host="skyrl",
        tests=(
            "tests/backends/skyrl_train/test_token_based_batching_utils.py",
            "tests/backends/skyrl_train/distributed/test_bin_packing.py",
        ),
        num_tests=32,
        stubs=(
            *("aiohttp", "cloudpathlib", "datasets", "hydra", "jaxtyping", "loguru", "omegaconf"),
            *("orjson", "peft", "pybase64", "ray", "requests", "skyrl_gym", "vllm", "zstandard"),
        ),
        python_312=True,
    ),
    Suite(
        host="megatron_bridge",
        tests=("tests/functional_tests/test_groups/data/packing/test_algorithms.py",),
        num_tests=17,
        requirements=("einops==0.8.1",),
        stubs=(
            *("transformer_engine", "modelopt", "omegaconf", "hydra", "datasets", "nvtx", "wandb"),
            "megatron.training",
        ),
    ),
    Suite(
        host="roll",
        tests=("tests/utils/test_sequence_packing.py", "tests/utils/test_dynamic_batching.py"),
        num_tests=3,
        requirements=("tensordict==0.10.0", "pyvers==0.1.0", "codetiming==1.4.0"),
        stubs=(
            *("ray", "datasets", "peft", "accelerate", "trl", "modelscope", "wandb", "vllm"),
            *("transfer_queue", "cloudpickle", "omegaconf", "requests", "opentelemetry", "grpc"),
            *("google", "psutil", "pybase64", "imageio", "dacite", "more_itertools"),
        ),
    ),
    Suite(
        host="verl",
        tests=("tests/utils/test_seqlen_balancing.py",),
        num_tests=7,
        known_failures={
            "test_seqlen_balancing_distributed_params": (
                "it wants ceil(tokens / budget) micro-batches, which can put one over the budget"
            )
        },
        needs_device=True,
        stubs=("ray", "codetiming", "hydra", "omegaconf", "datasets", "pandas", "PIL", "peft"),
        requirements=(
            "tensordict==0.15.3",
            "pyvers==0.2.3",
            "orjson==3.11.4",
            "cloudpickle==3.1.2",
        ),
    ),
)


def suite_of(host: str) -> Suite:
    """The suite of a host.

    Raises:
        KeyError: it has none.
    """
    return {suite.host: suite for suite in SUITES}[host]
