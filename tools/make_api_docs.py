"""Write the generated part of docs/api/*.md: signatures and docstrings of what users call.

    python tools/make_api_docs.py

A page's head is written by hand and stays; what follows its line `MARK` is made from the package.
Each name has its signature, the first paragraph and the first example of its docstring, and one
sentence for each argument, field, result and error. `tests/unit/repository/test_api_docs.py` holds
that the pages are current.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megapack.base.field_docs import field_docs

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "api"
MARK = "<!-- What follows is written by tools/make_api_docs.py from the docstrings. -->"

# Per page the names, as users import them. The methods of a class follow it after colons. Names
# after a minus have no lines for their arguments: few users call them, or another name has these.
PAGES: dict[str, str] = {
    "planning": """
        megapack.build_dp_schedule
        megapack.Layout
        megapack.Policy
        megapack.SharedPrefixes:from_samples:-from_groups
        megapack.Plan:-to_json:-from_json:-digest:explain
        -megapack.StepPlan
        megapack.MicroBatch
        -megapack.check_plan
        -megapack.plan.file.read_plan
        -megapack.plan_report
        megapack.PlanReport
        -megapack.simulate
        megapack.CostModel
        -megapack.config.cost_file.read_cost
        megapack.errors
    """,
    "samples": """
        megapack.samples.SampleBatch:from_prompt_response:from_padded:from_lengths:set_tokens:set_field
        -megapack.ImageRef
        megapack.samples.TensorField
        -megapack.samples.to_padded
        -megapack.job.data.advantages.SampleReward
        -megapack.job.data.advantages.group_advantages
    """,
    "objectives": """
        megapack.loss.SFT
        megapack.loss.PPO
        megapack.loss.GRPO
        megapack.loss.GSPO
        megapack.loss.ValueLoss
        megapack.loss.DPO
        megapack.loss.PairwiseReward
        -megapack.loss.pair_signs
        megapack.loss.Distillation
        megapack.loss.Correction
        -megapack.loss.sample_weights
        megapack.loss.Objective:__call__
    """,
    "schedule": """
        megapack.schedule.ScheduleAdapter:step:forward
        megapack.schedule.StepResult
        megapack.launch.start
        -megapack.launch.stop
        megapack.job.gpt.build_model
        -megapack.job.gpt.build_vision
        -megapack.job.gpt.specs.local_layer_spec
        -megapack.job.gpt.optimizer.build_optimizer
        -megapack.model.check_replicas
        -megapack.model.overlap.finish_param_gathers
        -megapack.model.head.replace_output_layer
    """,
    "hf": """
        megapack.job.hf.load_hf_weights
        megapack.job.hf.export_hf
        -megapack.job.hf.export_checkpoint
        -megapack.job.hf.load_adapters
        -megapack.job.hf.export_adapters
    """,
    "patching": """
        megapack.hosts.patching.apply
        -megapack.hosts.patching.revert
        -megapack.hosts.patching.status
        -megapack.hosts.patching.check
        megapack.hosts.patching.Status
        -megapack.hosts.megatron_lm.PlannedStep
    """,
}
# Dataclasses whose inherited fields are listed with their own: bases are not on a page.
_WITH_INHERITED = {"Layout", "PlanReport"}
# Of these only some fields have a line: the names of the others say enough, or another page does.
_FIELDS = {
    "CostModel": "fixed per_token per_token_sq per_sample backward_ratio stage_weights p2p",
    "Layout": "etp microbatch_group_size fp8",
    "MicroBatch": "samples row_tokens tokens padded_tokens dp_ranks pieces",
    "Plan": "",
    "PlanReport": "fill imbalance bubble_fraction seconds equal_work_seconds peak_live_tokens",
    "Policy": "",
    "SharedPrefixes": "",
}
_NOTES = {
    "CostModel": "[Calibration](../calibration.md) measures one.",
    "Objective": "Optional: `needs_segments = True` for sums over samples as a fourth argument.",
    "Layout": "Fields without a line are sizes of Megatron's groups.",
    "Policy": "Each field is a key of the section [`plan`](../configuration.md#plan). What the "
    "options gain and cost: [planning options](../planning_options.md).",
}

_SECTION = re.compile(r"^(Args|Reads|Metrics|Returns|Raises):\s", re.MULTILINE)
_ENTRY = re.compile(r"^(\S[^:]*): (.*)", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z\"(`\[\d])")
_ALIAS = re.compile(r"(?<![\w.\"])(?:checks\.)?[A-Z]\w*(?![\w.\"])")
_ERRORS = "ConfigError PlanError DataError ScheduleError RankError CheckpointError PatchError"
_WIDTH = 90
_STAR = inspect.Parameter.KEYWORD_ONLY
_SLASH = inspect.Parameter.POSITIONAL_ONLY
Kind = Literal["Args", "Reads", "Metrics", "Returns", "Raises"]


class Docstring(NamedTuple):
    """A docstring of Google's style, read."""

    summary: str
    """The first paragraph, on one line."""
    example: str
    """The first block of code; "" if there is none."""
    sections: dict[str, str]
    """Text by section."""

    def entries(self, section: Kind) -> list[tuple[str, str]]:
        """(name, one sentence) of a section's entries."""
        found = []
        for text in re.split(r"\n(?=\S)", self.sections.get(section, "").strip()):
            if match := _ENTRY.match(text):
                found.append((match[1], first_sentence(match[2])))
        return found


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        path = FOLDER / f"{name}.md"
        path.write_text(page(path), encoding="utf-8")


def page(path: Path) -> str:
    """A page's text as it should be: its own head, and the generated part."""
    head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{path} has no line {MARK!r}")
    parts = [text for name in PAGES[path.stem].split() for text in _entry(name)]
    return "\n".join([head + MARK, "", *parts])


def _entry(name: str) -> Iterator[str]:
    first, *methods = name.split(":")
    dotted = first.removeprefix("-")
    module_name, _, last = dotted.rpartition(".")
    if dotted == "megapack.errors":
        yield _errors(importlib.import_module(dotted))
        return
    found = getattr(importlib.import_module(module_name), last)
    yield _section(f"## {dotted}", found, last, is_brief=first != dotted)
    for method in methods:
        own = method.removeprefix("-")
        member = inspect.getattr_static(found, own)
        yield _section(f"### {last}.{own}", member, own, is_brief=own != method)


def _section(heading: str, found: Any, name: str, *, is_brief: bool) -> str:
    prefix = "@classmethod\n" if isinstance(found, classmethod) else ""
    found = getattr(found, "__func__", found)
    read = read_docstring(found)
    code = class_code(found) if inspect.isclass(found) else prefix + function_code(found, name)
    lines = [heading, "", "```python", code, "```", "", read.summary, ""]
    if read.example:
        language = "pycon" if read.example.startswith(">>>") else "py"
        lines += [f"```{language}", read.example, "```", ""]
    if is_brief:
        return "\n".join(lines).rstrip() + "\n"
    if name in _NOTES:
        lines += [_NOTES[name], ""]
    lines += [f"- {_names(names)}: {text}" for names, text in _items(found, read)]
    lines += [f"- reads {_names(names)}: {text}" for names, text in read.entries("Reads")]
    for section in ("Metrics", "Returns"):
        if section in read.sections:
            lines.append(f"- {section.lower()}: {' '.join(read.sections[section].split())}")
    # Wrong values of a dataclass's fields are ConfigErrors, as a page's head says.
    if not dataclasses.is_dataclass(found):
        lines += [f"- raises {_names(names)}: {text}" for names, text in read.entries("Raises")]
    return "\n".join(lines).rstrip() + "\n"


def _items(found: Any, read: Docstring) -> list[tuple[str, str]]:
    """The arguments of a function or class, or the fields of a dataclass."""
    if not dataclasses.is_dataclass(found):
        return read.entries("Args")
    docs = field_docs(found)
    names = [field.name for field in _fields(found)]
    listed = _FIELDS.get(found.__name__, " ".join(names)).split()
    return [(name, first_sentence(docs[name])) for name in listed if name in docs]


def read_docstring(found: Any) -> Docstring:
    """The docstring of an object."""
    before, *rest = _SECTION.split(inspect.getdoc(found) or "")
    bodies = [textwrap.dedent(body.strip("\n")) for body in rest[1::2]]
    summary = before.strip().partition("\n\n")[0]
    sections = dict(zip(rest[::2], bodies, strict=True))
    return Docstring(" ".join(summary.split()), _example(before), sections)


def _example(text: str) -> str:
    """The first indented or interactive block of a text."""
    lines: list[str] = []
    for line in text.splitlines():
        # What is printed ends at a blank line, after which the docstring's prose goes on.
        is_printed = bool(lines and lines[-1]) and lines[0].startswith(">>> ")
        if line.startswith(("    ", ">>> ")) or is_printed or (lines and not line):
            lines.append(line)
        elif lines:
            break
    return textwrap.dedent("\n".join(lines)).strip()


def first_sentence(text: str) -> str:
    """A text's first sentence on one line.

    >>> first_sentence("Tokens per row, e.g. 512 of them. More.")
    'Tokens per row, e.g. 512 of them.'
    """
    return _SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]


def function_code(function: Any, name: str) -> str:
    """The `def` of a function, a parameter per line where one line is too short."""
    signature = inspect.signature(function)
    scope = inspect.unwrap(function).__globals__
    parameters = [_parameter(p, scope) for p in signature.parameters.values()]
    kinds = [p.kind for p in signature.parameters.values()]
    if _STAR in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(_STAR), "*")
    if _SLASH in kinds:
        parameters.insert(kinds.count(_SLASH), "/")
    result = signature.return_annotation
    suffix = "" if result is inspect.Signature.empty else f" -> {_shown_type(result, scope)}"
    line = f"def {name}({', '.join(parameters)}){suffix}: ..."
    if len(line) <= _WIDTH:
        return line
    body = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"def {name}(\n{body}){suffix}: ..."


def _parameter(parameter: inspect.Parameter, scope: dict[str, Any]) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_shown_type(parameter.annotation, scope)}"
    if parameter.default is not inspect.Parameter.empty:
        equals = " = " if ":" in text else "="
        text += f"{equals}{_shown_value(parameter.default)}"
    return text


def class_code(cls: Any) -> str:
    """A class's head, with its fields or its constructor."""
    bases = [b.__name__ for b in cls.__bases__ if b is not object and b.__name__[0] != "_"]
    if cls.__name__ in _WITH_INHERITED or getattr(cls, "_is_protocol", False):
        bases = [name for name in bases if name == "Protocol"]
    inherits = f"({', '.join(bases)})" if bases else ""
    head = f"class {cls.__name__}{inherits}:"
    if not dataclasses.is_dataclass(cls):
        if getattr(cls, "_is_protocol", False):
            return f"{head} ..."
        return f"{head}\n{textwrap.indent(function_code(cls.__init__, '__init__'), '    ')}"
    is_kw_only = all(field.kw_only for field in dataclasses.fields(cls))
    shown = "@dataclass(frozen=True, kw_only=True)" if is_kw_only else "@dataclass(frozen=True)"
    lines = [f"    {_field(field, _scope_of(cls, field.name))}" for field in _fields(cls)]
    return "\n".join([shown, head, *(lines or ["    ..."])])


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that its page lists."""
    own = inspect.get_annotations(cls)
    listed = dataclasses.fields(cls)
    if cls.__name__ not in _WITH_INHERITED:
        listed = tuple(field for field in listed if field.name in own)
    return [field for field in listed if not field.name.startswith("_")]


def _scope_of(cls: Any, field: str) -> dict[str, Any]:
    """Globals of the module that annotates a field."""
    owner = next(base for base in cls.__mro__ if field in inspect.get_annotations(base))
    return vars(importlib.import_module(owner.__module__))


def _field(field: dataclasses.Field[Any], scope: dict[str, Any]) -> str:
    text = f"{field.name}: {_shown_type(field.type, scope)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{text} = {_shown_value(field.default_factory())}"
    if field.default is dataclasses.MISSING:
        return text
    return f"{text} = {_shown_value(field.default)}"


def _shown_type(annotation: Any, scope: dict[str, Any]) -> str:
    """An annotation as it is written, with choices in place of their aliases."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _ALIAS.sub(lambda match: _meaning(match[0], scope), text.replace("'", '"'))


def _meaning(name: str, scope: dict[str, Any]) -> str:
    first, *rest = name.split(".")
    found = functools.reduce(getattr, rest, scope.get(first))
    is_union = typing.get_origin(found) in (types.UnionType, typing.Union)
    members = typing.get_args(found) if is_union else (found,)
    is_choice = any(typing.get_origin(member) is Literal for member in members)
    return " | ".join(map(_member, members)) if is_choice or len(members) > 1 else name


def _member(member: Any) -> str:
    if typing.get_origin(member) is not Literal:
        return inspect.formatannotation(member)
    choices = (f'"{c}"' if isinstance(c, str) else str(c) for c in typing.get_args(member))
    return f"Literal[{', '.join(choices)}]"


def _shown_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return value.__name__ if inspect.isclass(value) else repr(value)


def _names(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def _errors(module: Any) -> str:
    """A list of the errors that users meet."""
    lines = ["## megapack.errors", ""]
    for name in _ERRORS.split():
        error = getattr(module, name)
        lines.append(f"- `{name}`: {first_sentence(read_docstring(error).summary)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
