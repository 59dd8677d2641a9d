"""Imports run the way the data runs; read from the import statements of megapack/."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "megapack"

# A module imports its own layer and lower ones. 0 to 2 plan, without torch; 3 packs, without
# Megatron; 4 and 5 run; 6 is what people start. A plan is data that the simulator reads, so it
# stands beside it, and what makes plans stands above both.
LAYERS = [
    "__init__ config errors files folder_lock inputs jit layout length_file place policy "
    "typed yaml_io",
    "apex calibration cost cost_file cost_fit cost_sizes packing packing_balance packing_kk",
    "baselines pipeline pipeline_kernels pipeline_order plan plan_check plan_diff plan_file "
    "plan_grid plan_text search_even search_moves search_refine search_scoring step_split",
    "chrome_trace dp_schedule forecast page page_data plan_summary plot run_records search "
    "search_counts search_deal search_per_rank search_problem search_profile search_state "
    "timeline",
    "checkpoint_files cp_slices ragged samples thd",
    "attention attention_sdpa attention_varlen cpu experts frozen head init interrupt "
    "logprobs moe mtp outputs p2p preference reference routing run_context segments settings "
    "value_head",
    "trackers",
    "__main__ cli commands.__init__ commands.patch commands.run doctor doctor_probes "
    "hosts.__init__ hosts.balancing hosts.bin_packers hosts.flops hosts.megatron_lm "
    "hosts.megatron_lm_data hosts.miles hosts.nemo_rl hosts.nemo_rl_shards hosts.options "
    "hosts.rank_rows hosts.rollout_schedule hosts.skyrl hosts.slime hosts.tensor_rows "
    "hosts.unirl hosts.unirl_bins hosts.verl hosts.verl_items hosts.xtuner patch_files "
    "patch_target patching startup",
    "board executor",
    "attention_choice batch_passes batch_plan checkpoint checkpoint_state choices "
    "commands.arguments commands.check commands.costs commands.diff commands.doctor "
    "commands.dry_run commands.plan commands.plot commands.report commands.show "
    "commands.simulate commands.trace commands.train commands.tune consensus data_files "
    "data_index dataset dry_run field_docs forward generated guard job kernels launch "
    "layer_specs loop_config loss memory microbatch_events model model_config non_finite "
    "objectives optimizer out_of_memory planned_batch replan report rollouts run_data "
    "schedule schedule_run step_call tokenizer trace train train_config tune watchdog",
]
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}

# Who speaks with Megatron.
MEGATRON = {"attention", "attention_choice", "attention_sdpa", "attention_varlen", "kernels"}
MEGATRON |= {"checkpoint_state", "cpu", "experts", "forward", "model", "moe", "p2p"}
MEGATRON |= {"run_context", "schedule", "schedule_run", "settings", "trace", "train"}
MEGATRON |= {"doctor_probes", "out_of_memory", "layer_specs", "optimizer"}
MEGATRON |= {"hosts.megatron_lm", "hosts.megatron_lm_data"}

# Other frameworks are named by hosts/ alone. Megatron-LM's recipes are one of them.
FRAMEWORKS = (
    "accelerate deepspeed lightning miles nemo nemo_rl openrlhf ray sglang skyrl skyrl_train slime "
    "torchtitan transformers trl verl vllm megatron.training megatron.rl megatron.bridge"
)


@dataclass(frozen=True)
class Import:
    """One imported name: `from megapack.plan import Plan` is `megapack.plan.Plan`."""

    name: str
    line: int
    top: bool
    """At import time, not inside a function or under TYPE_CHECKING."""

    def of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


def modules() -> dict[str, Path]:
    """Dotted names below megapack, `plan` or `hosts.slime`, and their files."""
    files = (path for path in PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in files}


def imports(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(), str(path)).body, top=True))


def _imports(body: list[ast.stmt], top: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, top)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, field, [])
                inner_top = top and not function and not (typing_only and field == "body")
                yield from _imports(inner if isinstance(inner, list) else [], inner_top)


def imported_module(imported: Import, known: dict[str, Path]) -> str | None:
    """Which module of megapack an import loads: `plan` for megapack.plan.Plan."""
    if not imported.of("megapack"):
        return None
    parts = imported.name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        for name in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if name in known:
                return name
    return "__init__"


def complaints(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    layer = LAYER[module]
    for found in imports(path):
        where = f"{path.name}:{found.line} (layer {layer}) imports {found.name}"
        own = imported_module(found, known)
        if own is not None and found.top and LAYER[own] > layer:
            yield f"{where}, layer {LAYER[own]}"
        if layer <= 2 and (found.of("torch") or found.of("megatron")):
            yield f"{where}: what plans needs no torch"
        if found.of("megatron") and module not in MEGATRON:
            yield f"{where}: not among the modules that speak with Megatron"
        foreign = any(found.of(framework) for framework in FRAMEWORKS.split())
        if foreign and not module.startswith("hosts."):
            yield f"{where}: another framework, which is for hosts/"


def test_the_table_lists_every_module_once() -> None:
    listed = [name for names in LAYERS for name in names.split()]
    assert sorted(listed) == sorted(modules())
    assert set(LAYER) >= MEGATRON


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_of_a_module(module: str) -> None:
    known = modules()
    assert list(complaints(module, known[module], known)) == []


@pytest.mark.parametrize("module", sorted(MEGATRON))
def test_what_may_import_megatron_does(module: str) -> None:
    """A name that stays in the table without need would let an import in unseen."""
    assert any(found.of("megatron") for found in imports(modules()[module]))


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by these names, without their folders."""
    names = Counter(path.name for path in PACKAGE.parent.glob("tests/*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_cycles() -> None:
    known = modules()
    edges = {
        module: {
            own
            for found in imports(path)
            if found.top and (own := imported_module(found, known)) not in (None, module)
        }
        for module, path in known.items()
    }
    assert sum(map(len, edges.values())) > 20
    while leaves := {module for module, to in edges.items() if not to & edges.keys()}:
        edges = {module: to for module, to in edges.items() if module not in leaves}
    assert edges == {}


def test_the_reader_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "plan.py"
    path.write_text(
        "import torch.nn as nn\nfrom megapack import thd, Layout\n"
        "try:\n    import megatron\nexcept ImportError:\n    import slime\n"
        "if TYPE_CHECKING:\n    from megapack.train import Trainer\n"
        "class A:\n    import ray\n"
        "    def f(self):\n        with x:\n            import verl.trainer\n"
    )
    found = [(imported.name, imported.top) for imported in imports(path)]
    assert found == [
        ("torch.nn", True),
        ("megapack.thd", True),
        ("megapack.Layout", True),
        ("megatron", True),
        ("slime", True),
        ("megapack.train.Trainer", False),
        ("ray", True),
        ("verl.trainer", False),
    ]
    assert len(list(complaints("plan", path, modules()))) == 7


@pytest.mark.parametrize(
    "module",
    ["megapack.cli", "megapack.commands.train", "megapack.dry_run", "megapack.commands.tune"],
)
def test_planning_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("host", ["slime", "miles", "xtuner", "unirl"])
def test_hosts_that_plan_leave_torch_alone(host: str) -> None:
    """At import time, with all that they import."""
    known = modules()
    seen, waiting = set(), [f"hosts.{host}"]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for found in imports(known[module]):
            heavy = found.of("torch") or found.of("megatron")
            assert not (found.top and heavy), f"{module}:{found.line}"
            own = imported_module(found, known)
            if found.top and own is not None and own not in seen:
                waiting.append(own)
    assert "dp_schedule" in seen or host == "unirl"


def test_what_test_modules_take_from_each_other_is_there() -> None:
    """Jobs that need a GPU, or minutes, would tell of it there alone."""
    root = PACKAGE.parent
    trees = {path: ast.parse(path.read_text()) for path in root.glob("tests/*/*.py")}
    missing = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                source = trees.get(root / f"{node.module.replace('.', '/')}.py")
                names = {alias.name for alias in node.names} - bound_names(source)
                missing += [f"{path.name}:{node.lineno} {name}" for name in names if source]
    assert missing == []


def bound_names(tree: ast.Module | None) -> set[str]:
    """What the statements of a module bind, also where these are indented."""
    nodes = list(ast.walk(tree)) if tree else []
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.alias)}
    return defined | {n.id for n in nodes if isinstance(n, ast.Name)}
