"""Plans of fixed inputs stay as in the golden files.

If a change is meant to alter plans, rewrite the files with MEGAPACK_WRITE_GOLDEN=1 and read the
difference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import build_dp_schedule, check_plan

pytestmark = pytest.mark.golden

FOLDER = Path(__file__).parent


def _cases() -> dict[str, tuple[list[int], dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location("golden_cases", FOLDER / "cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES  # type: ignore[no-any-return]


CASES = _cases()


DIGESTS = FOLDER / "digests.json"


def _golden_digests() -> dict[str, str]:
    return json.loads(DIGESTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_plan_equals_the_golden_plan(name: str) -> None:
    lengths, arguments = CASES[name]
    plan = build_dp_schedule(lengths, **arguments)
    check_plan(plan, lengths)
    if os.environ.get("MEGAPACK_WRITE_GOLDEN"):
        (FOLDER / f"{name}.plan").write_text(str(plan), encoding="utf-8")
        digests = _golden_digests() | {name: plan.digest()}
        DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert str(plan) == (FOLDER / f"{name}.plan").read_text(encoding="utf-8")
    assert plan.digest() == _golden_digests()[name]


def _vector_units() -> str:
    """CPU features that numpy uses on this machine beyond its baseline; it can disable these."""
    return " ".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"])


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "777", "OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "1", "LC_ALL": "C"},
        # Plain IEEE arithmetic, without vector units and compiled kernels.
        {"NUMBA_DISABLE_JIT": "1", "NPY_DISABLE_CPU_FEATURES": _vector_units()},
    ],
    ids=["hash_seed", "threads", "no_machine_code"],
)
def test_plans_do_not_depend_on_the_process(environment: dict[str, str], repo_root: Path) -> None:
    code = (
        "from cases import CASES\n"
        "from megapack import build_dp_schedule\n"
        "for name, (lengths, arguments) in CASES.items():\n"
        "    print(name, build_dp_schedule(lengths, **arguments).digest())\n"
    )
    path = f"{repo_root}{os.pathsep}{FOLDER}"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    digests = dict(line.split() for line in run.stdout.splitlines())
    assert digests == _golden_digests()


def test_every_golden_plan_has_a_case() -> None:
    assert {file.stem for file in FOLDER.glob("*.plan")} == set(CASES) == _golden_digests().keys()
