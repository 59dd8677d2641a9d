"""Settings of megapack in a host's own config, as its own parser and its own worker read them.

    python -m tests.hosts.steps.native verl +actor_rollout_ref.megapack.light_rank=pad
    python -m tests.hosts.steps.native slime --megapack-count-rule legal

Prints the options that are in force where the host goes on, or the one line of the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import typing
from typing import Any

from megapack.errors import ConfigError
from megapack.hosts import patching
from tools.hosting import import_stubs
from tools.hosting.sources import installed, source

# Hydra and what it is made of; the last has no wheel, and is installed from its source.
CONFIG_PACKAGES = ("hydra-core==1.3.2", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3")
SERVERS = ("psutil", "uvicorn", "fastapi", "aiohttp", "zmq", "msgspec", "requests", "starlette")
READERS = (
    "absl",
    "httpx",
    "soundfile",
    "decord",
    "librosa",
    "torchaudio",
    "math_verify",
    "nltk",
    "pandas",
)
ONE_RANK = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}


class Reached(Exception):
    """The host's own code goes on after it has given its config to megapack."""


def verl(overrides: list[str]) -> None:
    """verl's Hydra config, and the constructor of its worker."""
    from tests.hosts.steps import verl as step

    step.STUBS = (*(name for name in step.STUBS if name not in ("omegaconf", "hydra")), *SERVERS)
    step.import_verl()
    from hydra import compose, initialize_config_module
    from verl.workers import engine_workers

    engine_workers.Worker.__init__ = _reached
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer", overrides)
    engine_workers.ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")


def nemo_rl(overrides: list[str]) -> None:
    """NeMo-RL's YAML, its overrides, its checked config, and the constructors of both sides."""
    import typing_extensions

    from tests.hosts.steps import nemo_rl as step

    # Below Python 3.12 pydantic takes no other.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    step.ABSENT = (
        *(name for name in step.ABSENT if name not in ("omegaconf", "hydra")),
        *READERS,
        *SERVERS,
    )
    step.prepare()
    step.add_later_names()
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.models.policy import lm_policy
    from nemo_rl.models.policy.workers import megatron_policy_worker as workers
    from nemo_rl.utils import config
    from omegaconf import OmegaConf

    config.register_omegaconf_resolvers()
    file = source("nemo_rl") / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    values = config.parse_hydra_overrides(config.load_config(file), overrides)
    policy = MasterConfig(**OmegaConf.to_container(values, resolve=True)).policy
    workers.log_gpu_memory_diagnostics = lm_policy.resolve_policy_worker_cls = _reached
    for make in (
        lambda: lm_policy.Policy(None, policy, None),
        lambda: workers.MegatronPolicyWorkerImpl(policy, None, worker_sharding_annotations=None),
    ):
        with contextlib.suppress(Reached):
            make()


def slime(arguments: list[str]) -> None:
    """slime's parser, and what its actors call first."""
    _rollout_host("slime", arguments)


def miles(arguments: list[str]) -> None:
    """As slime's."""
    _rollout_host("miles", arguments)


def _rollout_host(host: str, arguments: list[str]) -> None:
    from tests.hosts.steps import rollout_hosts

    sys.argv[2:] = ["--debug-train-only", "--rollout-batch-size", "16", *arguments]
    sys.path.append(str(source("megatron_lm")))
    sys.path.insert(0, str(source(host)))
    importlib.import_module("megatron.core.pipeline_parallel")
    import_stubs.install(*rollout_hosts.ABSENT)
    parsers = importlib.import_module(f"{host}.utils.arguments")
    provider = getattr(parsers, f"get_{host}_extra_args_provider")(None)
    from megatron.training.arguments import parse_args

    args = parse_args(provider, ignore_unknown_args=True)
    initialize = importlib.import_module(f"{host}.backends.megatron_utils.initialize")
    initialize.set_args = _reached
    initialize.init(args)


def _reached(*args: Any, **kwargs: Any) -> Any:
    from megapack.hosts import megatron_core

    own = importlib.import_module(f"megapack.hosts.{sys.argv[1]}")
    options = (own.configure.__self__.current, megatron_core.OPTIONS.current)
    print(json.dumps([dataclasses.asdict(each) for each in options]))
    own.configure()
    megatron_core.configure()
    raise Reached


def main() -> int:
    """Run one host's parser and worker."""
    host, *given = sys.argv[1:]
    os.environ.update(ONE_RANK)
    sys.path += [str(installed(package)) for package in CONFIG_PACKAGES]
    from megapack import cpu

    cpu.enable()
    patching.apply(host)
    try:
        with contextlib.suppress(Reached):
            globals()[host](given)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
