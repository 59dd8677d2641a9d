"""Compare verl's own seqlen_balancing.py with megapack.hosts.verl on the same random inputs.

    tools/host_check.sh verl
    python tools/host_check_verl.py FOLDER_WITH_VERL [--inputs 500]

verl's file runs unchanged. The modules of verl that it imports are replaced by stubs: the real ones
start Ray and need tensordict, and the compared functions only use them to select rows of a dict.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from megapack.hosts import verl as ours
from megapack.hosts.shared.tensor_rows import take

Rows = list[list[int]]


@dataclass
class Tally:
    """Results of one function on all inputs."""

    name: str
    inputs: int = 0
    equal: int = 0
    """The same parts in the same order."""
    fewer: int = 0
    """Fewer micro-batches than verl, within the budget; or a result where verl raises."""
    both_raise: int = 0
    over_verl: int = 0
    """Inputs for which verl makes a row over the budget."""
    over_ours: int = 0
    """Inputs for which megapack makes a row over the budget."""
    violations: list[str] = field(default_factory=list)

    def line(self) -> str:
        cells = [self.name, self.inputs, self.equal, self.fewer, self.both_raise]
        cells += [self.over_verl, self.over_ours, len(self.violations)]
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| function | inputs | equal | fewer micro-batches | both raise | verl over budget | "
    "megapack over budget | violations |"
)


def load_verl(folder: Path) -> ModuleType:
    """Load verl/utils/seqlen_balancing.py of the folder, with stubs for the rest of verl."""

    def add_stub(name: str, **names: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(names)
        sys.modules[name] = module

    def select(batch: dict[str, Any], row: list[int]) -> dict[str, Any]:
        return {name: take(value, row) for name, value in batch.items()}

    add_stub("verl")
    add_stub("verl.protocol", DataProto=object)
    add_stub("verl.utils.tensordict_utils", index_select_tensor_dict=select)
    tensordict_utils = sys.modules["verl.utils.tensordict_utils"]
    add_stub("verl.utils", tensordict_utils=tensordict_utils)
    add_stub("verl.utils.device", get_device_name=lambda: "cpu")
    path = folder / "verl" / "utils" / "seqlen_balancing.py"
    spec = importlib.util.spec_from_file_location("verl.utils.seqlen_balancing", path)
    if spec is None or spec.loader is None:
        sys.exit(f"no {path}")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def random_lengths(rng: np.random.Generator) -> list[int]:
    """Lengths of 1 to 128 samples: uniform, short ones with some of 3000, or a heavy tail."""
    num = int(rng.integers(1, 129))
    kind = rng.integers(3)
    if kind == 0:
        return rng.integers(1, 2000, num).tolist()
    if kind == 1:
        return np.where(rng.random(num) < 0.8, rng.integers(50, 400, num), 3000).tolist()
    return np.clip(rng.lognormal(6, 1, num), 1, 16384).astype(int).tolist()


def compare(tally: Tally, values: list[int], theirs: Rows, mine: Rows) -> None:
    """Compare parts of the same items: no sample lost, and the heaviest part not heavier."""
    tally.inputs += 1
    tally.equal += theirs == mine
    if sorted(chain.from_iterable(mine)) != list(range(len(values))):
        tally.violations.append(f"{tally.name}: samples lost or twice: {mine}")
    if len(mine) == len(theirs) and heaviest(values, mine) > heaviest(values, theirs):
        tally.violations.append(f"{tally.name}: worse balance for {values}")


def heaviest(values: list[int], rows: Rows) -> int:
    return max(sum(values[i] for i in row) for row in rows)


def partitions(verl: ModuleType, inputs: int) -> Iterator[Tally]:
    """Compare the functions that partition a list of numbers."""
    for name in ("get_seqlen_balanced_partitions", "karmarkar_karp", "greedy_partition"):
        rng = np.random.default_rng(0)
        tally = Tally(name)
        for _ in range(inputs):
            values = random_lengths(rng)
            parts = int(rng.integers(1, len(values) + 1))
            equal_size = len(values) % parts == 0 and bool(rng.integers(2))
            arguments = (values, parts, equal_size)
            compare(tally, values, getattr(verl, name)(*arguments), getattr(ours, name)(*arguments))
        yield tally


def group_partitions(verl: ModuleType, inputs: int) -> Tally:
    """Compare `get_group_balanced_partitions`."""
    rng = np.random.default_rng(1)
    tally = Tally("get_group_balanced_partitions")
    for _ in range(inputs):
        group_size = int(rng.integers(1, 5))
        parts = int(rng.integers(1, 9))
        lengths = rng.integers(1, 4000, group_size * parts * int(rng.integers(1, 6))).tolist()
        uids = [i // group_size for i in range(len(lengths))]
        arguments = (lengths, uids, parts)
        theirs = verl.get_group_balanced_partitions(*arguments)
        mine = ours.get_group_balanced_partitions(*arguments)
        compare(tally, [ours.calculate_workload(n) for n in lengths], theirs, mine)
    return tally


def micro_batches(verl: ModuleType, inputs: int) -> Tally:
    """Compare `rearrange_micro_batches` of one rank, with budgets down to the longest sample."""
    rng = np.random.default_rng(2)
    tally = Tally("rearrange_micro_batches")
    for _ in range(inputs):
        lengths = random_lengths(rng)
        group_size = int(rng.choice([1, 1, 2]))
        lengths = lengths[: len(lengths) // group_size * group_size] or lengths * group_size
        budget = int(max(lengths) * group_size * rng.choice([1, 1.2, 2, 5]))
        settings = {
            "num_batches_divided_by": rng.choice([None, 2, 4]),
            "min_num_micro_batch": rng.choice([None, 3]),
            "use_dynamic_bsz_balance": bool(rng.integers(2)),
            "force_group_size": group_size,
        }
        ids = torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged)
        results = [attempt(module, {"input_ids": ids}, budget, settings) for module in (verl, ours)]
        judge(tally, lengths, budget, *results)
    return tally


def attempt(
    module: ModuleType, batch: dict[str, Any], budget: int, settings: dict[str, Any]
) -> Rows | None:
    """The rows, or None if the function raises."""
    try:
        return module.rearrange_micro_batches(batch, budget, **settings)[1]
    except (AssertionError, ValueError):
        return None


def judge(
    tally: Tally, lengths: list[int], budget: int, theirs: Rows | None, mine: Rows | None
) -> None:
    """Add one input of `rearrange_micro_batches` to the tally."""
    if mine is None:
        tally.inputs += 1
        tally.both_raise += theirs is None
        if theirs is not None:
            tally.violations.append(f"only megapack raises: {lengths}, budget {budget}")
        return
    if heaviest(lengths, mine) > budget:
        tally.over_ours += 1
        tally.violations.append(f"over the budget of {budget}: {lengths}")
    tally.over_verl += theirs is not None and heaviest(lengths, theirs) > budget
    tally.fewer += theirs is None or len(mine) < len(theirs)
    if theirs is not None and len(mine) > len(theirs):
        tally.violations.append(f"more micro-batches than verl: {lengths}, budget {budget}")
    compare(tally, [ours.calculate_workload(n) for n in lengths], theirs or mine, mine)
    tally.equal -= theirs is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inputs", type=int, default=500)
    options = parser.parse_args()
    verl = load_verl(options.folder)
    tallies = [*partitions(verl, options.inputs), group_partitions(verl, options.inputs)]
    tallies.append(micro_batches(verl, options.inputs))
    print(HEADER, "|---" * 8 + "|", *(tally.line() for tally in tallies), sep="\n")
    violations = [violation for tally in tallies for violation in tally.violations]
    for violation in violations[:10]:
        print(violation[:400], file=sys.stderr)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
