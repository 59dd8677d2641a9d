"""Every fault in every phase of a step on every rank: 120 jobs of 4 ranks over gloo.

    python tools/fault_matrix.py [--faults FAULT ...] [--phases PHASE ...] [--ranks RANK ...]
                                 [--set section.key=value ...] [--write NAME]

With --set train.executor=operations, steps run as lists of operations; with plan.backward=split,
weight_gradients is a phase too and must be asked for.

With --set plan.context_parallel=dynamic, DP ranks share the micro-batches of the faults. Two more
faults have one phase each and must be asked for: stopped (SIGSTOP in a forward), and other_sharers
(one rank plans that other micro-batches are shared), which needs that setting.

Prints a line per case and a table of seconds from the fault to the last rank's error. --write puts
the table into docs/measured/NAME.md. The exit code is 1 if a case did not end as promised.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.ranks.rank_fault_worker import ELSEWHERE, FAULTS, IN_ONE_PHASE, PHASES
from tests.dist.ranks.rank_faults import WORLD, Case, Outcome, cases, run_case
from tools.pages.measured import versions, write


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS, *IN_ONE_PHASE], default=FAULTS)
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES + ELSEWHERE, default=PHASES, help="those of a step"
    )
    parser.add_argument("--ranks", nargs="+", type=int, choices=range(WORLD), default=range(WORLD))
    parser.add_argument(
        "--set", nargs="+", default=(), metavar="section.key=value", help="settings of the job"
    )
    parser.add_argument("--write", metavar="NAME", help="a file of docs/measured for the table")
    args = parser.parse_args()
    outcomes: dict[Case, Outcome] = {}
    for case in cases(args.faults, args.phases, args.ranks):
        with tempfile.TemporaryDirectory(prefix="megapack-fault-") as folder:
            outcomes[case] = run_case(case, Path(folder), *args.set)
        print(f"{case}: {outcomes[case].seconds:.1f} s", *outcomes[case].complaints, flush=True)
    failed = [case for case, outcome in outcomes.items() if outcome.complaints]
    lines = _table(outcomes, args.faults, args.phases)
    held = f"{len(outcomes) - len(failed)} of {len(outcomes)} cases ended as promised"
    middle = statistics.median(outcome.seconds for outcome in outcomes.values())
    print("", *lines, f"\nmedian {middle:.1f} s", held, sep="\n")
    if args.write:
        title = "Fault matrix" + (f" with {', '.join(args.set)}" if args.set else "")
        what = (
            "Seconds from the fault until the last rank has its error, the slowest of the ranks\n"
            f"on which the fault is put, over gloo. {held}."
        )
        print(write(args.write, title, what, lines, versions("megatron-core", "torch")))
    return 1 if failed else 0


def _table(
    outcomes: dict[Case, Outcome], faults: Sequence[str], phases: Sequence[str]
) -> list[str]:
    """The seconds of the slowest rank, per fault and phase."""
    lines = ["| fault | " + " | ".join(phases) + " |", "|---|" + "---:|" * len(phases)]
    for fault in faults:
        slowest = []
        for phase in phases:
            seconds = [
                outcome.seconds
                for case, outcome in outcomes.items()
                if (case.fault, case.phase) == (fault, phase)
            ]
            slowest.append(f"{max(seconds):.1f}" if seconds else "")
        lines.append(f"| {fault} | " + " | ".join(slowest) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
