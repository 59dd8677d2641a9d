"""Options that several commands share, and the objects that are read from them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from megapack.base.field_docs import field_docs
from megapack.base.files import write_output
from megapack.commands.parser import Parser
from megapack.config.shipped import shipped_configs
from megapack.cost.memory import GIB
from megapack.errors import ConfigError, PlanError, brief
from megapack.job.data.lengths import Columns, LengthTable, read_length_file
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.policy import Policy

T = TypeVar("T")

# 1 PiB, beyond any GPU: a larger number is in other units.
_MAX_GIB = 2**20


def _read(text: str, read: Callable[[str], T], wanted: str) -> T:
    try:
        return read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{brief(text)}; set {wanted}") from None


def integer(text: str) -> int:
    """Read an option's value as an integer."""
    return _read(text, int, "an integer")


def number(text: str) -> float:
    """Read an option's value as a number."""
    return _read(text, float, "a number")


def listed(choices: tuple[str, ...], text: str) -> tuple[Any, ...]:
    """A list separated by commas: of these choices, or without any of integers."""
    found = text.split(",")
    if not choices:
        return _read(text, lambda _: tuple(map(int, found)), "integers separated by commas")
    unknown = [part for part in found if part not in choices]
    if unknown:
        raise argparse.ArgumentTypeError(f"{brief(unknown[0])}; set some of {', '.join(choices)}")
    return tuple(found)


class ListConfigs(argparse.Action):
    """An option that lists the shipped configs, with the first sentence of each, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for name, path in shipped_configs().items():
            lines = path.read_text(encoding="utf-8").splitlines()
            comment = " ".join(line[2:] for line in lines if line.startswith("# "))
            print(f"{name}\n    {comment.partition('. ')[0]}")
        parser.exit()


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `section.key=value`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="values that replace those of the config: plan.max_tokens_per_gpu=8192",
    )


def add_plan(parser: argparse.ArgumentParser, name: str = "PLAN") -> None:
    """Add PLAN."""
    parser.add_argument(name.lower(), metavar=name, help="a plan.json, or the text of a plan")


def add_output(parser: argparse.ArgumentParser, default: str, what: str = "the file") -> None:
    """Add -o."""
    parser.add_argument(
        *("-o", "--output"), metavar="FILE", help=f"{what} to write ({default})", default=None
    )
    parser.set_defaults(default_output=default)


def add_step(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Add --step."""
    which = "of all steps, this one only" if default is None else f"number of the step ({default})"
    parser.add_argument("--step", type=integer, metavar="S", default=default, help=which)


def add_lengths(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add LENGTHS and the options that name its columns."""
    parser.add_argument(
        "lengths",
        nargs=None if required else "?",
        metavar="LENGTHS",
        help="a row per sample: CSV, JSON, Parquet, or - for standard input; or a data file "
        "of text or chats, which the tokenizer of --config counts",
    )
    group = parser.add_argument_group("columns (by default, found by known names)")
    docs = field_docs(Columns)
    for field in fields(Columns):
        what = _help(docs[field.name], None, whole=False)
        group.add_argument(f"--{field.name}-column", metavar="NAME", help=what)


def read_table(args: argparse.Namespace) -> LengthTable:
    """The samples of LENGTHS."""
    columns = {field.name: getattr(args, f"{field.name}_column") for field in fields(Columns)}
    return read_length_file(args.lengths, Columns(**columns), getattr(args, "config", None))


def add_fields(
    group: argparse._ActionsContainer, cls: Any, *, skip: Collection[str] = (), whole: bool = False
) -> None:
    """Add an option for each field of a dataclass, `--row-shape` for `row_shape`.

    The first sentence under the field is the help. A field with default True gets the switch
    `--no-NAME`. An option that is not given is None, so that `given_fields` leaves it to the
    dataclass.

    Args:
        skip: fields without an option.
        whole: all sentences are the help.
    """
    docs = field_docs(cls)
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.name in skip:
            continue
        group.add_argument(
            f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}",
            dest=field.name,
            default=None,
            help=_help(docs[field.name], field.default, whole),
            **_form(hints[field.name], field.default),
        )


def _form(hint: Any, default: object) -> dict[str, Any]:
    """Arguments of `add_argument` for a field of this type."""
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": "store_false" if default else "store_true"}
    if hint is int:
        return {"type": integer, "metavar": "N"}
    if hint is str:
        return {"metavar": "TEXT"}
    return {"type": number, "metavar": "X"}


def _help(text: str, default: object, whole: bool) -> str:
    """A field's text as the help of an option: lower case first, the default last."""
    if not whole:
        text = re.split(r"\. (?=[A-Z\"])|; (?=None)", text)[0]
    if text[1].islower() or text[1] == " ":
        text = text[0].lower() + text[1:]
    text = text.rstrip(".").replace("%", "%%")
    if default is None or default is MISSING or isinstance(default, bool):
        return text
    return f"{text} ({default:g})" if isinstance(default, float) else f"{text} ({default})"


def given_fields(args: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """The fields of a dataclass whose options are given."""
    values = {field.name: getattr(args, field.name, None) for field in fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add every field of `Layout`."""
    group = parser.add_argument_group("layout")
    add_fields(group, Layout, skip=("fp8",))
    group.add_argument(
        "--fp8",
        choices=["true", "mxfp8", "blockwise", "nvfp4"],
        help="recipe, for alignment (none)",
    )


def read_layout(args: argparse.Namespace) -> Layout:
    """The layout of the options."""
    given = given_fields(args, Layout)
    if args.fp8 == "true":
        given["fp8"] = True
    return Layout(**given)


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the options that split samples over optimizer steps."""
    group = parser.add_argument_group("optimizer steps (without these, all samples in one)")
    group.add_argument(
        "--global-batch-size", type=integer, metavar="N", help="rollouts per optimizer step"
    )
    group.add_argument(
        "--num-steps", type=integer, metavar="N", help="number of steps, of equal tokens"
    )


def add_policy(parser: Parser, *, skip: Collection[str] = ()) -> None:
    """Add every field of `Policy` but for some behind --help-policy."""
    group = parser.add_topic(
        "policy",
        "options for what the planner may do, such as --split-samples auto",
        "what the planner may do (docs/planning_options.md)",
    )
    add_fields(group, Policy, skip=skip, whole=True)


def read_policy(args: argparse.Namespace) -> Policy:
    """The policy of the options."""
    return Policy(**given_fields(args, Policy))


def add_memory_limit(group: argparse._ArgumentGroup) -> None:
    """Add --gpu-memory-gib."""
    group.add_argument(
        "--gpu-memory-gib",
        type=number,
        default=76.0,
        metavar="X",
        help="GiB of a GPU that training may use (76: what CUDA and fragmentation leave of 80 GB)",
    )


def read_memory_limit(args: argparse.Namespace) -> int:
    """The memory limit in bytes.

    Raises:
        ConfigError: not a GPU's memory size.
    """
    if not 0 < args.gpu_memory_gib < _MAX_GIB:
        raise ConfigError(
            f"--gpu-memory-gib={args.gpu_memory_gib:g}; set the GiB of one GPU, above 0"
        )
    return int(args.gpu_memory_gib * GIB)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def print_json(value: Any) -> None:
    """Print JSON for programs; refuses NaN and infinity, which JSON does not have."""
    print(json.dumps(value, indent=2, allow_nan=False))


def selected_steps(plan: Plan, step: int | None) -> range:
    """Indices of the steps that --step selects: one, or all.

    Raises:
        ConfigError: no such step.
        PlanError: no steps, another number of ranks than the layout's, or a row without tokens.
    """
    if not plan.steps:
        raise PlanError("the plan has no steps; make the plan again")
    for number, planned in enumerate(plan.steps):
        if len(planned.ranks) != plan.layout.dp:
            raise PlanError(
                f"step {number} has {len(planned.ranks)} ranks, the layout dp={plan.layout.dp}; "
                "make the plan again"
            )
        if any(mb.row_tokens < 1 for rank in planned.ranks for mb in rank):
            raise PlanError(f"step {number} has a row of 0 tokens; make the plan again")
    if step is None:
        return range(len(plan.steps))
    if not 0 <= step < len(plan.steps):
        raise ConfigError(
            f"step {step} of {len(plan.steps)}; set --step from 0 to {len(plan.steps) - 1}"
        )
    return range(step, step + 1)


def output_of(args: argparse.Namespace) -> str:
    """The file of `add_output`."""
    return str(args.output or args.default_output)


def check_output(args: argparse.Namespace, *given: str | None) -> str:
    """The file of `add_output`, which must be none of the given files.

    Raises:
        ConfigError: -o is an input, or standard output.
    """
    output = output_of(args)
    if output == "-":
        raise ConfigError("-o - is standard output, where the summary goes; set a file name")
    for path in filter(None, given):
        if os.path.exists(path) and os.path.exists(output) and os.path.samefile(path, output):
            raise ConfigError(f"-o {output} is the input itself; set another -o")
    return output


def write_result(args: argparse.Namespace, content: str | bytes) -> None:
    """Write the file of `add_output`.

    What an earlier command wrote under the default name is kept under another, unless it is the
    same; a name that is given with -o is written over.

    Raises:
        ConfigError: the file cannot be written.
    """
    output = output_of(args)
    data = content.encode() if isinstance(content, str) else content
    path = Path(output)
    if args.output is None and path.is_file() and path.read_bytes() != data:
        numbered = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
        kept = next(name for name in numbered if not name.exists())
        path.rename(kept)
        print(f"{output} was there: it is {kept} now", file=sys.stderr)
    write_output(output, data)
