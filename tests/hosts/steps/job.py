"""What the workers of hosts' steps share.

A worker runs one host's own training step (and forward-only pass) on a layout, with some patches:

    torchrun --nproc-per-node 2 -m tests.hosts.steps.NAME OUT --layout dp=1,pp=2,vpp=2 \
        --patches NAME --steps 2

and each rank writes OUT/rank0.json, OUT/rank1.json, ...: a `Report`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megapack import Layout
from megapack.errors import ConfigError
from tests.dist.spawn import checked_job, rank_reports
from tools.hosting.sources import NoSource, source

T = TypeVar("T")


@dataclass(kw_only=True)
class Report:
    """What one rank saw. Lists have one entry per step."""

    losses: list[float] = field(default_factory=list)
    """The loss that the host logs; empty on ranks where the host has none."""
    grad_norms: list[float] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    """Of the forward-only pass, in sample order; empty on ranks where the host has none."""
    num_microbatches: list[int] = field(default_factory=list)
    row_tokens: list[list[int]] = field(default_factory=list)
    """Tokens of this rank's rows, as the host's model is given them."""
    step_seconds: list[float] = field(default_factory=list)
    num_shape_exchanges: int = 0
    """Exchanges of tensor shapes between pipeline stages, in all steps."""
    params_sum: float = 0.0
    """Sum of the absolute values of this rank's parameters after the last step, in float64."""
    patched: list[str] = field(default_factory=list)
    """Names that a patch replaced."""
    more: dict[str, Any] = field(default_factory=dict)
    """What only this host has."""


class Arguments(argparse.Namespace):
    """A worker's command line."""

    folder: Path
    layout: Layout
    patches: list[str]
    steps: int
    case: str
    turns: list[str]


def parse_arguments() -> Arguments:
    """Read the command line, before anything of the host is imported.

    A case with `shared` in it sets MEGAPACK_SHARE_PREFIXES=1. One with `lora` has adapters.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", type=parse_layout, default=Layout())
    parser.add_argument(
        "--patches", type=lambda text: list(filter(None, text.split(","))), default=[]
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--case", default="", help="what only this host has")
    parser.add_argument("--turns", nargs=2, default=[], help="see `Turns`")
    arguments = parser.parse_args(namespace=Arguments())
    if "shared" in arguments.case:
        os.environ["MEGAPACK_SHARE_PREFIXES"] = "1"
    if arguments.turns and int(os.environ.get("RANK", "0")) == 0:
        _turns.append(Turns(*arguments.turns))
    return arguments


def parse_layout(text: str) -> Layout:
    """`dp=2,pp=2` or `tp=2,sequence_parallel=true` as a layout.

    >>> parse_layout("pp=2,vpp=2").pp
    2

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    parts = [part.partition("=") for part in filter(None, text.split(","))]
    try:
        sizes = {name: value == "true" or int(value) for name, _, value in parts}
        return Layout(**sizes)  # type: ignore[arg-type]
    except (TypeError, ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a layout like dp=2,pp=2: {error}"
        ) from error


def workers() -> list[str]:
    """The hosts that have a worker, which are the modules here that run as programs.

    >>> "slime" in workers(), "job" in workers()
    (True, False)
    """
    modules = sorted(Path(__file__).parent.glob("*.py"))
    start = '\nif __name__ == "__main__":\n'
    return [path.stem for path in modules if start in path.read_text(encoding="utf-8")]


def count_layer_tokens(report: Report, chunk: Any) -> None:
    """From here on, add up in `more["layer_tokens"]` the tokens that a chunk's layers train on."""
    from megapack.model.head import unwrapped

    report.more["layer_tokens"] = 0

    def count(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if layer.training:
            hidden = output[0] if isinstance(output, tuple) else output
            report.more["layer_tokens"] += len(hidden)

    unwrapped(chunk).decoder.layers[0].register_forward_hook(count, with_kwargs=True)


def assert_shared(reports: Sequence[Report]) -> None:
    """Layers of each rank have run on fewer tokens than the host's rows have."""
    for report in reports:
        host_tokens = sum(map(sum, report.row_tokens))
        assert 0.5 * host_tokens < report.more["layer_tokens"] < 0.97 * host_tokens


def watch_gradients(report: Report, optimizer: Any, chunks: Sequence[Any]) -> None:
    """From here on, note every trained parameter's gradient of the optimizer's first step in
    `more["gradients"]`, before it is clipped."""
    step = optimizer.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        report.more.setdefault("gradients", tensors(chunks, lambda param: param.main_grad))
        return step(*args, **kwargs)

    optimizer.step = noted


def tensors(chunks: Sequence[Any], value: Callable[[Any], Any]) -> dict[str, list[float]]:
    """A tensor of each trained parameter, by its name in the whole model."""
    from megapack.model.parameters import global_parameters

    named = [pair for chunk in chunks for pair in global_parameters(chunk)]
    return {
        name: value(param).detach().flatten().tolist()
        for name, param in named
        if param.requires_grad
    }


def assert_same_tensors(
    reports: Sequence[Report], alone: Sequence[Report], *, gradients: float, weights: float
) -> None:
    """`more["gradients"]` and `more["weights"]` of all ranks are those of other reports.

    Args:
        gradients, weights: the largest error that is allowed, relative to a tensor's norm.
    """
    for name, most in (("gradients", gradients), ("weights", weights)):
        found, wanted = (
            {key: value for report in own for key, value in report.more[name].items()}
            for own in (reports, alone)
        )
        assert found.keys() == wanted.keys()
        for key, want in wanted.items():
            assert math.dist(found[key], want) < most * math.hypot(*want), (name, key)


def count_shape_exchanges(report: Report) -> None:
    """From here on, count the exchanges of shapes in the report."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    exchange = P2PCommunicator._communicate_shapes

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        report.num_shape_exchanges += 1
        return exchange(self, *args, **kwargs)

    P2PCommunicator._communicate_shapes = counted


class Turns:
    """This job's steps and another's run in turns, so that both meet the same other work.

    Args:
        own, other: named pipes; a job has its turn when it reads a byte from its own.
    """

    def __init__(self, own: str, other: str) -> None:
        # Opened for both, a pipe does not wait for its other end.
        self._own, self._other = (os.open(path, os.O_RDWR) for path in (own, other))
        self._is_first = True

    def wait(self) -> None:
        """End this job's turn, and wait for its next one."""
        if not self._is_first:
            os.write(self._other, b".")
        self._is_first = False
        os.read(self._own, 1)


# Of the first rank, at most one.
_turns: list[Turns] = []


def wait_for_turn() -> None:
    """Let the other job run a step, if this one's steps take turns with another's."""
    for turns in _turns:
        turns.wait()


def cpu_seconds() -> float:
    """CPU seconds of Python's threads in this process so far.

    Gloo's threads are left out: each process group has some, which look for work a hundred times a
    second. Those of Megatron's groups took a third of a step's CPU seconds on a busy machine, where
    a step lasts long.
    """
    # Other threads that have run Python are in the list as dummies, also when they have ended.
    own = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
    clocks = (time.pthread_getcpuclockid(t.ident) for t in own if t.ident is not None)
    return sum(map(time.clock_gettime, clocks))


def timed(report: Report, step: Callable[[], T]) -> T:
    """Run a step on all ranks at once, and add its seconds to the report."""
    import torch.distributed as dist

    wait_for_turn()
    dist.barrier()
    start = time.perf_counter()
    start_cpu = cpu_seconds()
    result = step()
    report.more.setdefault("cpu_seconds", []).append(cpu_seconds() - start_cpu)
    dist.barrier()
    report.step_seconds.append(time.perf_counter() - start)
    return result


def write(report: Report, folder: Path) -> None:
    """Write this rank's report."""
    import torch.distributed as dist

    from megapack.hosts import patching

    report.patched = [status.target for status in patching.status() if status.state == "applied"]
    text = json.dumps(dataclasses.asdict(report))
    (folder / f"rank{dist.get_rank()}.json").write_text(text, encoding="utf-8")


def start(prepare: Callable[[], None]) -> Arguments:
    """Read the command line, join the job, make the host importable, and patch it."""
    arguments = parse_arguments()
    from megapack import launch, patching
    from tests.hosts.steps import adapters

    launch.quiet_known_warnings()
    launch.start("cpu")
    if "lora" in arguments.case:
        adapters.import_bridge()
    prepare()
    patching.apply(*arguments.patches)
    return arguments


def import_host(host: str) -> Path:
    """Put the host's source, and nothing else of it, on the import path; skips without one."""
    folder = source(host)
    sys.path.insert(0, str(folder))
    return folder


def run_step(
    host: str,
    folder: Path,
    *,
    layout: str,
    world: int,
    patches: Sequence[str] = (),
    steps: int = 2,
    case: str = "",
    timeout_s: float = 300,
    worker: str = "",
    te: str | None = None,
    turns: Sequence[str] = (),
) -> list[Report]:
    """Run a host's worker, and return the reports of its ranks; skips where its source is absent.

    Args:
        turns: two named pipes, see `Turns`.
        worker: the module below `tests.hosts.steps`; "" = the host's name.
        te: the release of Transformer Engine whose layers the host runs; see `run_job`.
    """
    try:
        source(host)
    except NoSource as error:
        pytest.skip(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    args = [str(folder), "--layout", layout, "--patches", ",".join(patches)]
    args += ["--steps", str(steps), "--case", case]
    args += ["--turns", *turns] if turns else []
    module = f"tests.hosts.steps.{worker or host}"
    # The hosts' own communication is not megapack's to judge.
    checked_job(world, module, args, timeout_s=timeout_s, te=te, nccl_rules=False)
    return [Report(**report) for report in rank_reports(folder, world)]


class Runs:
    """Runs of one host's worker; the same run is made once.

    Args:
        host: the worker.
        folder: where reports go.
        case: of runs that name none.
        timeout_s: of one run.
        te: see `run_step`.
    """

    def __init__(
        self,
        host: str,
        folder: Path,
        *,
        case: str = "",
        timeout_s: float = 300,
        te: str | None = None,
    ) -> None:
        self.host = host
        self._folder = folder
        self._case = case
        self._timeout_s = timeout_s
        self._te = te
        self._done: dict[tuple[str, str, str], list[Report]] = {}

    def folder(self, *run: str) -> Path:
        """Where a run has written."""
        return self._folder / str([*self._done].index(run))  # type: ignore[arg-type]

    def __call__(self, layout: str, patches: str = "", case: str | None = None) -> list[Report]:
        """The reports of all ranks.

        Args:
            patches: names, with commas.
        """
        key = (layout, patches, self._case if case is None else case)
        if key not in self._done:
            self._done[key] = run_step(
                self.host,
                self._folder / str(len(self._done)),
                layout=layout,
                world=parse_layout(layout).world_size,
                patches=[name for name in patches.split(",") if name],
                case=key[2],
                timeout_s=self._timeout_s,
                te=self._te,
            )
        return self._done[key]
