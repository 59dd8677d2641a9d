"""Write the table of claims about GPUs, and the table of the ranks' parts.

    python tools/make_gpu_claims.py [--check]

The claims become docs/measured/gpu_claims.md, the parts a table of docs/maintainers/gpu_checks.md.

A report is `gpu_report.json` or `ranks_report.json` of `tools/gpu_check.sh`, under any name. A
claim of claims.yaml names the parts that show it; of the reports with such parts the newest counts.
Reports of a run on CPU stand-ins show nothing. With `--check` nothing is written; the exit code is
1 if a table differs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.config import load_config  # noqa: E402
from tests.gpu import features, pipeline_worker, worker  # noqa: E402
from tools.bench_gpu import MODELS  # noqa: E402
from tools.benching.gpu_report import last_line  # noqa: E402
from tools.nccl.parts import NAMES, PARTS  # noqa: E402
from tools.nccl.problem import cases  # noqa: E402
from tools.pages.marks import put_between, table  # noqa: E402
from tools.pages.measured import MEASURED, Head, write  # noqa: E402

PAGE = ROOT / "docs" / "maintainers" / "gpu_checks.md"
CLAIMS = MEASURED / "gpu_claims.md"
PART_MARKS = ("<!-- parts -->", "<!-- end of parts -->")
ATTENTIONS = ("te", "varlen", "sdpa")
_HEADER = ("claim", "read", "on CPU stand-ins", "one GPU", "several ranks, NCCL")
_WHAT = (
    "How far each claim about GPUs has been checked: [what the columns and cells mean]"
    '(../maintainers/gpu_checks.md#the-table-of-claims). "check" is `REHEARSE=1 '
    "tools/gpu_check.sh`; a cell of one GPU that names no machine is what the first run showed, "
    "on an H200."
)
# What a failed part found is cut to this, so that a row of the table stays readable.
_LINE_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table; its texts are Markdown."""

    id: str
    claim: str
    read: str
    rehearsed: str
    one_gpu: tuple[str, ...] | None = None
    """Parts "job/part" that together show it on one GPU; None if one GPU cannot show it."""
    seen: str = "no"
    """What the cell of one GPU says until a report has one of these parts."""
    ranks: tuple[str, ...] | None = None
    """Parts of the check of several ranks, or "part: expression" for those of its cases in whose
    name the regular expression is found; None if the claim has nothing to do with ranks."""
    is_measured: bool = False
    """Whether its parts only measure figures, without limits that these must keep."""

    @property
    def verdict(self) -> str:
        """What a cell says if all parts have passed."""
        return "measured" if self.is_measured else "yes"


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The file of claims."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run of a check found on real GPUs."""

    name: str
    date: str
    where: str
    """The machine as a cell names it."""
    of_ranks: bool
    """Whether it is the check of several ranks."""
    outcomes: Mapping[str, str] = field(repr=False)
    """"job/part", "part" or "part: case" -> "" if it passed, else why it failed. What did not run
    is left out."""

    def matching(self, wanted: str) -> dict[str, str]:
        """The outcomes of what a claim names."""
        found = {name: line for name, line in self.outcomes.items() if fits(wanted, name)}
        # A job that died has no outcome of the part that killed it, as tests/gpu/test_gpu.py reads.
        died = f"{wanted.partition('/')[0]}/job"
        return found or {name: line for name, line in self.outcomes.items() if name == died}


def read_claims(path: Path, one_gpu: Collection[str], ranks: Collection[str]) -> tuple[Claim, ...]:
    """The claims of a file.

    Args:
        one_gpu: "job/part" that a report of one GPU can have.
        ranks: "part" and "part: case" that a report of several ranks can have.

    Raises:
        ConfigError: it is no YAML of `Claims`.
        ValueError: a claim names what no report can have, or two have one id.
    """
    claims = load_config(path, [], Claims).claims
    for number, claim in enumerate(claims):
        if any(claim.id == earlier.id for earlier in claims[:number]):
            raise ValueError(f"{path}: two claims have the id {claim.id}; rename one")
        for key, wanted, known in (
            ("one_gpu", claim.one_gpu, one_gpu),
            ("ranks", claim.ranks, ranks),
        ):
            for name in wanted or ():
                if not any(fits(name, other) for other in known):
                    near = ", ".join(difflib.get_close_matches(name, sorted(known), cutoff=0))
                    raise ValueError(
                        f"{path}: {claim.id}.{key}: no check has {name}; the nearest are {near}"
                    )
    return claims


def fits(wanted: str, name: str) -> bool:
    """Whether a claim's entry means a part or a case of this name."""
    part, colon, expression = wanted.partition(": ")
    if not colon:
        # A test of several parameters is one part.
        return name.partition("[")[0] == wanted
    return name.startswith(f"{part}: ") and bool(re.search(expression, name[len(part) + 2 :]))


def one_gpu_parts() -> set[str]:
    """ "job/part" of each part that `tools/gpu_check.sh` can report.

    Beside the jobs of tests/gpu/run.py these are the benchmark's models, and tests that are parts
    of no job ("pytest").
    """
    found = {f"{name}/{part}" for name in ATTENTIONS for part in worker.parts("cuda", name)}
    found |= {f"features/{part}" for part in features.parts(list(ATTENTIONS))}
    found |= {
        f"pipeline_{name}/{layout}_{dtype}"
        for name in ATTENTIONS
        for layout in pipeline_worker.LAYOUTS
        for dtype in ("bf16", "fp32")
    }
    found |= {f"models/{Path(config).stem}" for config, *_ in MODELS}
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"pytest/{path.name}::{node.name}")
    return found


def rank_parts() -> set[str]:
    """Each part that `tools/gpu_check.sh --ranks` can report, and "exact: case" on 2 to 8 ranks.

    Which attention a case has depends on the machine's packages: each is taken.
    """
    names = {case.name.rpartition(" ")[0] for ranks in (2, 4, 8) for case in cases(ranks)}
    return {*NAMES, *(f"exact: {name} {attention}" for name in names for attention in ATTENTIONS)}


def read_reports(folder: Path) -> list[Report]:
    """The reports of real GPUs, newest first; it says which others it leaves out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["rehearsed"]:
            print(f"{path}: it ran on CPU stand-ins and shows nothing; remove it", file=sys.stderr)
        else:
            found.append(_report(path.stem, report))
    return sorted(found, key=lambda report: (report.date, report.name), reverse=True)


def _report(name: str, report: dict[str, Any]) -> Report:
    of_ranks = "parts" in report
    if of_ranks:
        several = f"{report['num_gpus']} GPUs, {report['device']}"
        on = f"one {report['device']}" if report["num_gpus"] == 1 else several
        where = f"{report['ranks']} ranks on {on}"
        outcomes = _of_ranks(report["parts"])
    else:
        where = next((model["device"] for model in report["models"] if "device" in model), "a GPU")
        outcomes = _of_one_gpu(report)
    return Report(
        name=name, date=report["date"], where=where, of_ranks=of_ranks, outcomes=dict(outcomes)
    )


def _of_ranks(found: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for part in found:
        named = {part["name"]: {"status": part["status"], "line": "; ".join(part["failures"])}}
        named |= {f"{part['name']}: {name}": case for name, case in part["cases"].items()}
        for name, what in named.items():
            if what["status"] == "passed":
                yield name, ""
            elif what["status"] == "failed":
                yield name, what["line"]


def _of_one_gpu(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tests = report.get("tests", {})
    # Without the job "pytest" no test has held the figures against their limits.
    for job, found in tests.items() if "pytest" in tests else ():
        for part, what in found.items():
            error = last_line(what.get("error", ""))
            # A job for which there was no time left has failed at nothing.
            if "skipped" not in what and not error.startswith("not run"):
                yield f"{job}/{part}", error
    for model in report["models"]:
        ways = [way for cell in model["cells"] for way in cell["ways"].values()]
        errors = [what["error"] for what in (model, *ways) if "error" in what]
        if ways or errors:
            yield f"models/{model['model']}", last_line(errors[0]) if errors else ""


def cell(
    wanted: tuple[str, ...] | None, reports: list[Report], verdict: str, before: str = "no"
) -> str:
    """What the newest of the reports with any of a claim's parts says of it."""
    if wanted is None:
        return "-"
    for report in reports:
        found = {name: report.matching(name) for name in wanted}
        outcomes = {name: line for part in found.values() for name, line in part.items()}
        if not outcomes:
            continue
        for name, line in outcomes.items():
            if line:
                text = " ".join(f"{name}: {line}".split())
                return f"failed: {text[:_LINE_CHARS]}".replace("|", r"\|")
        missing = [name for name, outcomes in found.items() if not outcomes]
        if missing:
            return f"in part: {report.where}, without {', '.join(missing)}"
        return f"{verdict}: {report.where}"
    return before


def claims_text(claims: tuple[Claim, ...], reports: list[Report]) -> str:
    """The table, and a line that names the reports."""
    one_gpu = [report for report in reports if not report.of_ranks]
    of_ranks = [report for report in reports if report.of_ranks]
    rows = [
        (
            claim.claim,
            claim.read,
            claim.rehearsed,
            cell(claim.one_gpu, one_gpu, claim.verdict, claim.seen),
            cell(claim.ranks, of_ranks, claim.verdict),
        )
        for claim in claims
    ]
    links = [f"[{each.name}]({each.name}.json) ({each.where}, {each.date})" for each in reports]
    return f"{table(_HEADER, rows)}\n\nReports: {', '.join(links) or 'none yet'}."


def parts_text() -> str:
    """The table of the parts of the check of several ranks."""
    rows = [
        (f"`{name}`", part.shows + "; needs a GPU for each rank" * part.needs_gpus)
        for name, part in PARTS.items()
    ]
    return table(("part", "shows"), rows)


def claims_of(folder: Path) -> str:
    """The table of a folder of claims and reports."""
    claims = read_claims(folder / "claims.yaml", one_gpu_parts(), rank_parts())
    return claims_text(claims, read_reports(folder))


def written_claims() -> str:
    """The table as it stands, without the head of its file."""
    text = CLAIMS.read_text(encoding="utf-8") if CLAIMS.exists() else ""
    return text.removeprefix(Head.read(CLAIMS).text()).strip() if text else ""


def page_text() -> str:
    """The maintainers' page with the table of the ranks' parts."""
    return put_between(PAGE.read_text(encoding="utf-8"), PART_MARKS, parts_text())


def main() -> int:
    """Write what differs, or name it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether a table differs")
    options = parser.parse_args()
    claims, text = claims_of(MEASURED), page_text()
    old = [CLAIMS] * (claims != written_claims())
    old += [PAGE] * (text != PAGE.read_text(encoding="utf-8"))
    if options.check and old:
        names = " and ".join(str(path.relative_to(ROOT)) for path in old)
        print(f"{names}: old, run python tools/make_gpu_claims.py", file=sys.stderr)
        return 1
    if CLAIMS in old:
        title = "What has been checked on a GPU"
        write(CLAIMS.stem, title, _WHAT, [claims], "the packages of each report")
    if PAGE in old:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
