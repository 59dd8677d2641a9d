"""Fuzz what reads plans, configs and rollouts, and the planner, under atheris.

    python tools/fuzz.py TARGET --runs 200000 [--seconds N] [--seed 1] [--corpus DIR] [--out FILE]

TARGET is one of plan_json, plan_text, config, rollouts, schedule, or all: each in a process of its
own, one after the other. A corpus that is kept lets the next run begin where this one ended. The
exit code is 1 where there are findings: anything but the documented errors of one line, a run of
more than a second, or one that takes 500 MiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fuzzing.targets import TARGETS

RUNNER = Path(__file__).resolve().parent / "fuzzing" / "run.py"
COVERAGE = re.compile(r"cov: (\d+) .*?corp: (\d+)")


def fuzz(target: str, corpus: Path, **settings: float) -> dict[str, Any]:
    """Run one target; its summary, with the coverage that the fuzzer told last."""
    findings = corpus / "findings" / target
    documents = corpus / target
    for folder in (findings, documents):
        folder.mkdir(parents=True, exist_ok=True)
    options = [f"--{name}={value}" for name, value in settings.items()]
    options += [f"--corpus={documents}", f"--findings={findings}"]
    command = [sys.executable, str(RUNNER), target, *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    try:
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        summary = {"executions": 0, "taken": 0, "seconds": 0.0, "findings": []}
    if done.returncode:
        end = " / ".join(done.stderr.splitlines()[-3:])
        summary["findings"].append(f"the process ended with {done.returncode}: {end}")
    told = COVERAGE.findall(done.stderr)
    coverage, size = map(int, told[-1]) if told else (0, 0)
    return {"target": target, **summary, "coverage": coverage, "corpus": size}


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    head = "| target | executions | taken | seconds | per second | coverage | corpus | findings |"
    lines = [head, "|---" * 8 + "|"]
    for found in results:
        each = found["executions"] / max(found["seconds"], 1e-9)
        taken = found["taken"] / max(found["executions"], 1)
        lines.append(
            f"| {found['target']} | {found['executions']:,} | {taken:.0%} | {found['seconds']:.0f} "
            f"| {each:,.0f} | {found['coverage']:,} | {found['corpus']:,} | "
            f"{len(found['findings'])} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=(*TARGETS, "all"))
    parser.add_argument("--runs", type=int, default=200_000, help="executions per target")
    parser.add_argument("--seconds", type=float, default=math.inf, help="most per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs and findings")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed; pip install atheris==3.0.0", file=sys.stderr)
        return 2
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="megapack-fuzz-"))
    results = []
    for target in TARGETS if options.target == "all" else (options.target,):
        limits = {"runs": options.runs, "seconds": options.seconds}
        results.append(fuzz(target, corpus, seed=options.seed, **limits))
        print(table(results[-1:]).splitlines()[-1], flush=True)
        print("".join(f"  {line}\n" for line in results[-1]["findings"]), end="", flush=True)
    print(f"\n{table(results)}\n\ninputs and findings: {corpus}")
    if options.out:
        options.out.write_text(table(results) + "\n", encoding="utf-8")
    return int(any(found["findings"] for found in results))


if __name__ == "__main__":
    sys.exit(main())
