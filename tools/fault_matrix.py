"""Every fault in every phase of a step on every rank: 120 jobs of 4 ranks over gloo.

    python tools/fault_matrix.py [--faults FAULT ...] [--phases PHASE ...] [--ranks RANK ...]
                                 [--set section.key=value ...]

With --set train.executor=operations, steps run as lists of operations; with plan.backward=split,
weight_gradients is a phase too and must be asked for.

With --set plan.context_parallel=dynamic, DP ranks share the micro-batches of the faults. Two more
faults have one phase each and must be asked for: stopped (SIGSTOP in a forward), and other_sharers
(one rank plans that other micro-batches are shared), which needs that setting.

Prints a line per case and a table of seconds from the fault to the last rank's error. The exit code
is 1 if a case did not end as promised.
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
    args = parser.parse_args()
    outcomes: dict[Case, Outcome] = {}
    for case in cases(args.faults, args.phases, args.ranks):
        with tempfile.TemporaryDirectory(prefix="megapack-fault-") as folder:
            outcomes[case] = run_case(case, Path(folder), *args.set)
        print(f"{case}: {outcomes[case].seconds:.1f} s", *outcomes[case].complaints, flush=True)
    failed = [case for case, outcome in outcomes.items() if outcome.complaints]
    _print_table(outcomes, args.faults, args.phases)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases as promised")
    return 1 if failed else 0


def _print_table(
    outcomes: dict[Case, Outcome], faults: Sequence[str], phases: Sequence[str]
) -> None:
    """Print the seconds of the slowest rank, per fault and phase."""
    print("\n| fault | " + " | ".join(phases) + " |\n|---|" + "---:|" * len(phases))
    for fault in faults:
        slowest = []
        for phase in phases:
            seconds = [
                outcome.seconds
                for case, outcome in outcomes.items()
                if (case.fault, case.phase) == (fault, phase)
            ]
            slowest.append(f"{max(seconds):.1f}" if seconds else "")
        print(f"| {fault} | " + " | ".join(slowest) + " |")
    middle = statistics.median(outcome.seconds for outcome in outcomes.values())
    print(f"\nmedian {middle:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
