"""Every fault in every phase of a step on every rank: 120 jobs of 4 ranks over gloo.

    python tools/fault_matrix.py [--only TEXT] [overrides ...]

Prints a line per case and a table of seconds from the fault to the last rank's error; exit code 1
where a case ended otherwise than promised.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.rank_fault_worker import FAULTS, PHASES
from tests.dist.rank_faults import WORLD, Case, Outcome, every_case, run_case


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the job")
    args = parser.parse_args()
    outcomes: dict[Case, Outcome] = {}
    for case in every_case():
        if args.only in str(case):
            with tempfile.TemporaryDirectory(prefix="megapack-fault-") as folder:
                outcomes[case] = run_case(case, Path(folder), *args.overrides)
            print(f"{case}: {outcomes[case].seconds:.1f} s", *outcomes[case].complaints, flush=True)
    failed = [case for case, outcome in outcomes.items() if outcome.complaints]
    _print_table(outcomes)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases as promised")
    return 1 if failed else 0


def _print_table(outcomes: dict[Case, Outcome]) -> None:
    """Seconds, the largest of the ranks, per fault and phase."""
    print("\n| fault | " + " | ".join(PHASES) + " |\n|---|" + "---:|" * len(PHASES))
    for fault in FAULTS:
        cells = []
        for phase in PHASES:
            cases = [Case(fault, phase, rank) for rank in range(WORLD)]
            seconds = [outcomes[case].seconds for case in cases if case in outcomes]
            cells.append(f"{max(seconds):.1f}" if seconds else "")
        print(f"| {fault} | " + " | ".join(cells) + " |")
    if outcomes:
        middle = statistics.median(outcome.seconds for outcome in outcomes.values())
        print(f"\nmedian {middle:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
