"""One fuzz target under atheris, in a process of its own; `tools/fuzz.py` starts it.

    python tools/fuzzing/run.py TARGET --runs N --seconds N --seed S --corpus DIR --findings DIR

A finding is saved and the fuzzer goes on; the last line on standard output is a JSON summary.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib
import inspect
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MOST_SECONDS = 1.0
MOST_GROWTH_MIB = 500
_MOST_BYTES = 8192
_ADDRESS_SPACE = 6 << 30

# Bytecode that is instrumented cannot be compiled: of modules with kernels, only the functions are
# that are no kernels.
with_kernels = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "megapack").rglob("*.py")
    if "import kernel" in path.read_text()
)
with atheris.instrument_imports(include=["megapack"], exclude=with_kernels):
    from tools.fuzzing import targets


def instrument_functions(module_name: str) -> None:
    """Instrument what a module defines and does not compile."""
    module = importlib.import_module(module_name)
    holders = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass))]
    for holder in holders:
        for function in vars(holder).values():
            if inspect.isfunction(function) and function.__module__ == module_name:
                atheris.instrument_func(function)


class Watch:
    """Runs a target; keeps count, and one input of each kind of finding."""

    def __init__(self, hold: Callable[[bytes], bool], folder: Path, seconds: float) -> None:
        self.hold, self.folder, self.seconds = hold, folder, seconds
        self.executions = self.taken = 0
        self.findings: dict[str, str] = {}
        self.started = time.perf_counter()

    def __call__(self, data: bytes) -> None:
        self.executions += 1
        seconds, kib = time.process_time(), _peak_kib()
        try:
            self.taken += self.hold(data)
        except Exception as error:
            self._found(_kind(error), f"{error!r:.300}", data)
        seconds, mib = time.process_time() - seconds, (_peak_kib() - kib) >> 10
        if seconds > MOST_SECONDS:
            self._found("slow", f"{seconds:.1f} s", data)
        if mib > MOST_GROWTH_MIB:
            self._found("memory", f"{mib} MiB", data)
        if time.perf_counter() - self.started > self.seconds:
            self.tell()
            os._exit(0)

    def _found(self, kind: str, what: str, data: bytes) -> None:
        if kind in self.findings:
            return
        path = self.folder / hashlib.sha256(data).hexdigest()[:12]
        path.write_bytes(data)
        self.findings[kind] = f"{kind}: {what} ({path})"
        print(f"FINDING {self.findings[kind]}", file=sys.stderr, flush=True)

    def tell(self) -> None:
        """Print the summary."""
        summary = {
            "executions": self.executions,
            "taken": self.taken,
            "seconds": time.perf_counter() - self.started,
            "findings": list(self.findings.values()),
        }
        print(json.dumps(summary), flush=True)


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kind(error: BaseException) -> str:
    """An error's class and the innermost line of the package that it passed, or what is broken."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if "/megapack/" in frame.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else str(error)[:60]
    return f"{type(error).__name__} at {place}"


def schedule(data: bytes) -> bool:
    return targets.hold_schedule(atheris.FuzzedDataProvider(data).ConsumeIntInRange)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=targets.TARGETS)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--findings", type=Path, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # A warning is not an error here as it is in the tests: users see them as text.
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    for module in with_kernels:
        instrument_functions(module)
    documents = targets.DOCUMENTS.get(options.target)
    hold = documents.hold if documents else schedule
    # They also compile what is compiled at its first call.
    for seed in documents.seeds() if documents else [Random(k).randbytes(200) for k in range(60)]:
        hold(seed)
        (options.corpus / hashlib.sha256(seed).hexdigest()[:12]).write_bytes(seed)
    watch = Watch(hold, options.findings, options.seconds)
    atexit.register(watch.tell)

    settings = {
        "atheris_runs": options.runs,
        "seed": options.seed,
        "max_len": _MOST_BYTES,
        "mutate_depth": 2,
        "timeout": 60,
        "rss_limit_mb": 0,
        "artifact_prefix": f"{options.findings}/",
    }
    arguments = [f"-{name}={value}" for name, value in settings.items()]
    atheris.Setup([sys.argv[0], *arguments, str(options.corpus)], watch)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
