"""Settings in a host's own config: what is read, refused, and stronger than what."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapack import CostModel, Layout, patching
from megapack.errors import ConfigError, PatchError
from megapack.hosts import megatron_core, nemo_rl, verl
from megapack.hosts.shared.rollout_schedule import OPTIONS, SETTINGS, read_settings
from tests.hosts.stub import Host

pytestmark = pytest.mark.hosts


def test_a_block_sets_the_options_of_the_planner_and_of_the_step() -> None:
    verl.configure(light_rank="pad")
    block = {"layout": {"dp": 2, "pp": 4}, "cost": {"per_token": 2e-6}, "non_finite": "error"}
    verl.read_settings({"megapack": block})
    options = verl._OPTIONS.current
    assert options.layout == Layout(dp=2, pp=4)
    assert options.cost == CostModel(per_token=2e-6)
    assert options.light_rank == "pad"  # what the block does not name stays
    assert megatron_core.OPTIONS.current.non_finite == "error"


def test_costs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cost.yaml"
    file.write_text("cost:\n  per_token: 3.0e-6\n")
    nemo_rl.read_settings({"megapack": {"layout": {"dp": 2}, "cost": str(file)}})
    assert nemo_rl._OPTIONS.current.cost == CostModel(per_token=3e-6)


@pytest.mark.parametrize(
    ("read", "block", "says"),
    [
        (verl, {"light_rnk": "pad"}, "unknown key light_rnk; did you mean light_rank?"),
        (verl, {"light_rank": "padd"}, "expected error or pad; did you mean pad?"),
        (verl, {"share_prefixes": 1}, "share_prefixes is 1, expected true or false"),
        (verl, {"cost": "costs.yaml"}, "cost is used with a layout only; set both"),
        (verl, {"layout": {"vpp": 2}}, "vpp=2 with pp=1; set pp > 1 or vpp=1"),
        (verl, ["light_rank"], "megapack: this is a section, got a list of 1"),
        (nemo_rl, {"lengths": "reed"}, "expected read or exchange; did you mean read?"),
    ],
)
def test_a_block_is_refused_in_one_line(read: Any, block: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read.read_settings({"megapack": block})
    place = "actor_rollout_ref.megapack" if read is verl else "policy.megapack"
    assert str(caught.value).startswith(place)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_of_the_host_are_settings_too() -> None:
    """slime's `--custom-config-path` sets attributes without its parser."""
    read_settings(SimpleNamespace(megapack_count_rule="legal", megapack_share_prefixes=True))
    assert OPTIONS.current.count_rule == "legal"
    assert OPTIONS.current.share_prefixes
    assert megatron_core.OPTIONS.current.share_prefixes
    with pytest.raises(ConfigError, match=r"unknown key count_rul; did you mean count_rule\?"):
        read_settings(SimpleNamespace(megapack_count_rul="legal"))
    with pytest.raises(ConfigError, match=r"search=-1"):
        read_settings(SimpleNamespace(megapack_search=-1))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--megapack-count-rul", "legal"], "--megapack-count-rul; did you mean --megapack-count-"),
        (["--megapack-search", "-1"], "search=-1"),
        (["--megapack-share-prefixes=yes"], "share_prefixes is 'yes', expected true or false"),
    ],
)
def test_a_parser_refuses_it_at_once(
    given: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    with pytest.raises(SystemExit) as caught:
        SETTINGS.add_arguments(argparse.ArgumentParser()).parse_known_args()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_function_tells_its_argument_and_stays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def read(lengths: object) -> None:
        told.append(lengths)

    read.__module__ = "megapack.hosts.stub"
    monkeypatch.setattr(sys.modules["megapack.hosts.stub"], "pack", read)
    pack = host.load("stubhost.trainer").pack
    patching.apply(reading(host, "lengths"))
    assert host.load("stubhost.trainer").pack([1]) == "host"
    assert host.load("stubhost.utils.packing").pack(budget=1, lengths=[2]) == "host"
    assert told == [[1], [2]]
    with pytest.raises(TypeError):
        host.load("stubhost.trainer").pack()
    patching.revert(host.patches)
    assert host.load("stubhost.trainer").pack is pack


def file_with_reader(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, argument: str, reader: Any
) -> str:
    """A patch file whose only patch reads an argument of a function."""
    reader.__module__ = "megapack.hosts.stub"
    monkeypatch.setattr(sys.modules["megapack.hosts.stub"], "pack", reader)
    file = folder / "other.yaml"
    file.write_text(
        f"host: other\nseen: here\npatches:\n  - target: {target}\n    argument: {argument}\n"
        "    replacement: megapack.hosts.stub:pack\n    why: a test\n"
    )
    return str(file)


def test_what_a_reader_returns_takes_the_place_of_the_argument(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def twice(text: str) -> str:
        return text * 2

    file = file_with_reader(tmp_path, monkeypatch, "textwrap:dedent", "text", twice)
    patching.apply(file)
    try:
        assert [textwrap.dedent("a"), textwrap.dedent(text="b"), textwrap.dedent("")] == [
            "aa",
            "bb",
            "",
        ]
    finally:
        patching.revert(file)
    assert textwrap.dedent("a") == "a"


def test_a_reader_gets_the_default_of_an_argument_that_is_not_given(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As miles' tests call the function that adds options: without its argument."""

    def narrow(width: int) -> int:
        return width - 68

    file = file_with_reader(tmp_path, monkeypatch, "textwrap:wrap", "width", narrow)
    patching.apply(file)
    try:
        assert textwrap.wrap("a b c") == ["a", "b", "c"]
        assert textwrap.wrap("a b c", 71) == ["a b", "c"]
    finally:
        patching.revert(file)


def test_a_function_without_the_argument_is_refused(host: Host) -> None:
    host.load("stubhost.utils.packing")
    with pytest.raises(PatchError, match=r"expected a parameter config, found \(lengths"):
        patching.apply(reading(host, "config"))
    both = (
        Path(host.patches)
        .read_text()
        .replace("    argument", "    signatures: [(a)]\n    argument")
    )
    Path(host.patches).write_text(both)
    with pytest.raises(ConfigError, match="has 1 signatures and argument=config"):
        patching.apply(host.patches)


def reading(host: Host, argument: str) -> str:
    """The stub's patch file with an argument in place of signatures; returns its path."""
    file = Path(host.patch("stubhost.utils.packing:pack"))
    lines = file.read_text().splitlines()
    lines = [f"    argument: {argument}" if "signatures" in line else line for line in lines]
    file.write_text("\n".join(lines))
    return str(file)
