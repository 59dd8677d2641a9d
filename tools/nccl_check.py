"""Checks several ranks over NCCL, on one GPU or on several, against one process.

    python tools/nccl_check.py [--ranks N] [--parts NAME ...] [--out runs/gpu_check]

Starts with a probe of which way ranks can use NCCL here; without any, the other parts do not run.
Writes `ranks_report.json` and `ranks_report.md` after each part; the logs of its jobs lie beside
them under `ranks/PART/JOB`, and stay where the part has failed. The exit code is 1 if one has.
With `REHEARSE=1` (`tools/gpu_check.sh`) it runs over gloo, and `--fault hang:exact` puts a fault
into NCCL while that part runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megapack.base.files import write_whole
from tests.gpu.rehearsed import REHEARSED
from tools.bench_gpu import checked_out, packages
from tools.nccl.found import NOT_RUN, PASSED, Found
from tools.nccl.on_ranks import faked
from tools.nccl.parts import NAMES, PARTS, TOTAL_S, Part
from tools.nccl.report import has_failed, markdown
from tools.nccl.session import PATIENCE, STALL_S, Session

ROOT = Path(__file__).resolve().parents[1]
RANKS = (2, 4, 8)


def main() -> int:
    """Run the parts; returns the exit code."""
    options = _parser().parse_args()
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        print("nccl_check: torch finds no CUDA device", file=sys.stderr)
        return 2
    ranks = options.ranks or default_ranks(num_gpus)
    patience = PATIENCE if REHEARSED else 1
    session = Session(
        ranks=ranks,
        num_gpus=num_gpus,
        out=options.out.absolute(),
        rehearsed=REHEARSED,
        stall_s=options.stall_s or STALL_S * patience,
    )
    shutil.rmtree(session.out / "ranks", ignore_errors=True)
    (session.out / "ranks").mkdir(parents=True)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": checked_out(),
        "packages": packages(),
        "device": torch.cuda.get_device_name(),
        "num_gpus": num_gpus,
        "ranks": ranks,
        "way": "",
        "rehearsed": REHEARSED,
        "parts": [],
    }
    end = time.monotonic() + TOTAL_S * patience
    # A new machine compiles the planner for a minute or two, while the probe runs.
    compiling = subprocess.Popen([sys.executable, "-m", "megapack", "warm-up", "--all"], cwd=ROOT)
    wanted = dict.fromkeys(["probe", *(options.parts or NAMES)])
    for name in wanted:
        part = PARTS[name]
        if part.needs_gpus and ranks > num_gpus and not REHEARSED:
            continue
        report["parts"].append(_run(name, part, session, end, patience, options.fault))
        if name == "probe":
            report["way"] = session.way.name if report["parts"][0]["status"] == PASSED else ""
            compiling.wait()
        last = report["parts"][-1]
        print(f"{name}: {last['status']}, {last['seconds']:.0f} s: {last['line']}", flush=True)
        _write(report, session.out)
    print(markdown(report))
    return int(has_failed(report))


def default_ranks(num_gpus: int) -> int:
    """As many as GPUs, as far as the check has layouts for them; 4 on one."""
    return 4 if num_gpus == 1 else max(ranks for ranks in RANKS if ranks <= num_gpus)


def _run(
    name: str, part: Part, session: Session, end: float, patience: int, fault: str
) -> dict[str, Any]:
    """A part's entry of the report."""
    started = time.monotonic()
    has_way = name == "probe" or (session.out / "probe.json").exists()
    session.part = name
    session.end = min(end, started + part.limit_s * patience)
    kind, _, at = fault.partition(":")
    session.fault = kind if at == name else ""
    if not has_way:
        found, status = Found(line="NCCL lets these ranks not work together, see probe"), NOT_RUN
    elif session.left_s < 1:
        used = f"the {TOTAL_S * patience:.0f} s were used up; run it alone with --parts {name}"
        found, status = Found(line=used), NOT_RUN
    else:
        try:
            found = part.run(session)
        except Exception as error:  # the other parts still run
            traceback.print_exc()
            found = Found(failures=[f"the check itself: {type(error).__name__}: {error}"])
        status = found.status
    if status == PASSED:
        shutil.rmtree(session.out / "ranks" / name, ignore_errors=True)
    return {
        "name": name,
        "shows": part.shows,
        "status": status,
        "line": "; ".join(filter(None, [found.line, *found.failures[:1]])),
        "seconds": round(time.monotonic() - started, 1),
        "failures": found.failures,
        "figures": found.figures,
        "cases": found.cases,
    }


def _write(report: dict[str, Any], out: Path) -> None:
    for suffix, text in (("json", json.dumps(report, indent=1)), ("md", markdown(report))):
        write_whole(out / f"ranks_report.{suffix}", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=RANKS, help="default: GPUs, or 4 on one")
    parser.add_argument("--parts", nargs="+", choices=NAMES, help="these alone, after the probe")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_check")
    parser.add_argument("--stall-s", type=float, help="without progress; default: 60")
    faults = [f"{kind}:{name}" for name in NAMES for kind in faked.KINDS]
    parser.add_argument("--fault", choices=faults, default="", metavar="KIND:PART")
    return parser


if __name__ == "__main__":
    sys.exit(main())
