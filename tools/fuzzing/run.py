"""Runs one fuzz target under atheris; `tools/fuzz.py` starts it as its own process.

    python tools/fuzzing/run.py TARGET --runs N --seconds N --seed S --corpus DIR --findings DIR

Findings are saved and the fuzzer goes on. The last line on standard output is a JSON summary.
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

# An input is a finding beyond these limits; both chosen by hand.
MAX_SECONDS = 1.0
MAX_GROWTH_MIB = 500
_MAX_INPUT_BYTES = 8192
_ADDRESS_SPACE_BYTES = 6 << 30

# numba cannot compile instrumented bytecode. Modules with kernels are therefore imported without
# instrumentation, and `instrument_functions` adds it to their other functions.
modules_with_kernels = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "megapack").rglob("*.py")
    if "import kernel" in path.read_text()
)
with atheris.instrument_imports(include=["megapack"], exclude=modules_with_kernels):
    from tools.fuzzing import targets


def instrument_functions(module_name: str) -> None:
    """Instrument the functions and methods of a module that numba does not compile."""
    module = importlib.import_module(module_name)
    holders = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass))]
    for holder in holders:
        for function in vars(holder).values():
            if inspect.isfunction(function) and function.__module__ == module_name:
                atheris.instrument_func(function)


class Watch:
    """Runs a target on inputs; counts them and saves one input per kind of finding."""

    def __init__(self, hold: Callable[[bytes], bool], folder: Path, seconds: float) -> None:
        self.hold = hold
        self.folder = folder
        self.seconds = seconds
        self.executions = 0
        self.accepted = 0
        self.findings: dict[str, str] = {}
        self.started = time.perf_counter()

    def __call__(self, data: bytes) -> None:
        self.executions += 1
        started_cpu = time.process_time()
        started_kib = _peak_kib()
        try:
            self.accepted += self.hold(data)
        except Exception as error:
            self._save(_kind(error), f"{error!r:.300}", data)
        seconds = time.process_time() - started_cpu
        mib = (_peak_kib() - started_kib) >> 10
        if seconds > MAX_SECONDS:
            self._save("slow", f"{seconds:.1f} s", data)
        if mib > MAX_GROWTH_MIB:
            self._save("memory", f"{mib} MiB", data)
        if time.perf_counter() - self.started > self.seconds:
            self.print_summary()
            os._exit(0)

    def _save(self, kind: str, what: str, data: bytes) -> None:
        if kind in self.findings:
            return
        path = self.folder / hashlib.sha256(data).hexdigest()[:12]
        path.write_bytes(data)
        self.findings[kind] = f"{kind}: {what} ({path})"
        print(f"FINDING {self.findings[kind]}", file=sys.stderr, flush=True)

    def print_summary(self) -> None:
        """Print the counts and findings as one line of JSON."""
        summary = {
            "executions": self.executions,
            "accepted": self.accepted,
            "seconds": time.perf_counter() - self.started,
            "findings": list(self.findings.values()),
        }
        print(json.dumps(summary), flush=True)


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kind(error: BaseException) -> str:
    """An error's class, and its innermost line in the package or else the start of its message."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if "/megapack/" in frame.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else str(error)[:60]
    return f"{type(error).__name__} at {place}"


def schedule(data: bytes) -> bool:
    """`hold_schedule` with integers that atheris draws from the input."""
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
    # Tests turn warnings into errors; for users they are only text.
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    for module in modules_with_kernels:
        instrument_functions(module)
    documents = targets.DOCUMENTS.get(options.target)
    hold = documents.hold if documents else schedule
    # The seeds also make numba compile its kernels before any input is timed.
    for seed in documents.seeds() if documents else [Random(k).randbytes(200) for k in range(60)]:
        hold(seed)
        (options.corpus / hashlib.sha256(seed).hexdigest()[:12]).write_bytes(seed)
    watch = Watch(hold, options.findings, options.seconds)
    atexit.register(watch.print_summary)

    settings = {
        "atheris_runs": options.runs,
        "seed": options.seed,
        "max_len": _MAX_INPUT_BYTES,
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
