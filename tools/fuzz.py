"""Fuzz the planner and the readers of plans, configs and rollouts, under atheris.

    python tools/fuzz.py TARGET --runs 200000 [--seconds N] [--seed 1] [--corpus DIR] [--out FILE]

TARGET is plan_json, plan_text, config, hf_config, rollouts, schedule or all. Targets run one after
the other, each in its own process. With --corpus a later run continues from this one's inputs. The
exit code is 1 if there are findings. A finding is any exception except the documented one-line
errors, an input that takes more than 1 s of CPU time, or one that needs more than 500 MiB.
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
    """Run one target; return its summary and the last coverage that the fuzzer printed."""
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
        summary = {"executions": 0, "accepted": 0, "seconds": 0.0, "findings": []}
    if done.returncode:
        end = " / ".join(done.stderr.splitlines()[-3:])
        summary["findings"].append(f"the process ended with {done.returncode}: {end}")
    printed = COVERAGE.findall(done.stderr)
    coverage, size = map(int, printed[-1]) if printed else (0, 0)
    return {"target": target, **summary, "coverage": coverage, "corpus": size}


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = (
        "| target | executions | accepted | seconds | per second | coverage | corpus | findings |"
    )
    lines = [head, "|---" * 8 + "|"]
    for found in results:
        each = found["executions"] / max(found["seconds"], 1e-9)
        accepted = found["accepted"] / max(found["executions"], 1)
        lines.append(
            f"| {found['target']} | {found['executions']:,} | {accepted:.0%} "
            f"| {found['seconds']:.0f} | {each:,.0f} | {found['coverage']:,} "
            f"| {found['corpus']:,} | {len(found['findings'])} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=(*TARGETS, "all"))
    parser.add_argument("--runs", type=int, default=200_000, help="executions per target")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="folder for inputs and findings")
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
