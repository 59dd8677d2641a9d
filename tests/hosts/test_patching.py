"""Patches are applied and reverted in any order of imports; a mismatch is refused."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack.errors import ConfigError, PatchError
from megapack.hosts import patching
from megapack.hosts.patching.files import (
    PatchFile,
    Replacement,
    patch_set,
    read_patches,
    shipped_hosts,
)
from megapack.hosts.patching.target import is_like, parse_signature, signature_of
from megapack.hosts.startup import asked_hosts
from tests.hosts.stub import PACK, Host, pack, pack_steps

pytestmark = pytest.mark.hosts

TARGET = "stubhost.utils.packing.pack"


def states(host: Host) -> list[str]:
    return [status.state for status in patching.apply(host.patches)]


@pytest.mark.parametrize("imported_first", [False, True])
def test_the_host_gets_the_replacement_in_any_order(host: Host, imported_first: bool) -> None:
    if imported_first:
        host.load("stubhost.trainer")
    assert states(host) == ["applied" if imported_first else "waiting"]
    assert host.load("stubhost.trainer").pack([1]) == "megapack"
    assert host.load("stubhost.utils.packing").pack is pack
    (status,) = patching.status()
    assert (status.target, status.state, status.stale) == (TARGET, "applied", ())


def test_a_second_apply_logs_nothing(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    host.load("stubhost.trainer")
    assert states(host) == states(host) == ["applied"]
    assert [record.getMessage() for record in caplog.records] == [
        f"stubhost: {TARGET} is now megapack.hosts.stub.pack (a test)"
    ]


def test_stale_copies_outside_the_host_are_reported(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    script = host.load("stubscript")
    (status,) = patching.apply(host.patches)
    assert status.stale == ("stubscript.pack",)
    assert script.pack([1]) == "host"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"stubscript.pack still holds the original {TARGET}; apply")


def test_revert_restores_copies_in_the_host(host: Host) -> None:
    early = host.load("stubhost.trainer")
    original = early.pack
    patching.apply(host.patches)
    host.write("stubhost/late.py", "from stubhost.utils.packing import pack\n")
    late = host.load("stubhost.late")
    assert late.pack is early.pack is pack
    patching.revert(host.patches)
    assert late.pack is early.pack is original
    assert host.load("stubhost.utils.packing").pack is original
    assert patching.status() == ()
    patching.revert(host.patches)
    assert states(host) == ["applied"]


def test_revert_before_the_import_cancels_the_patch(host: Host) -> None:
    patching.apply(host.patches)
    patching.revert(host.patches)
    assert host.load("stubhost.utils.packing").pack([1]) == "host"


MOVED = {
    "signature": ("def pack(lengths, budget): pass", "found (lengths, budget)"),
    "default": ("def pack(lengths, *, budget=0): pass", "found (lengths, *, budget=0)"),
    "symbol": ("def packs(lengths): pass", "found no such name"),
    "kind": ("pack = 7", "found an object of type int"),
}


@pytest.mark.parametrize("source", MOVED)
def test_a_mismatch_is_refused_before_any_name_changes(host: Host, source: str) -> None:
    text, found = MOVED[source]
    host.write("stubhost/utils/packing.py", text)
    host.write("stubhost/sound.py", PACK)
    path = host.patch("stubhost.sound:pack", "stubhost.utils.packing:pack")
    sound = host.load("stubhost.sound")
    host.load("stubhost.utils.packing")
    with pytest.raises(PatchError) as error:
        patching.apply(path)
    for part in (TARGET, "expected (lengths, *, budget=None)", found, "run without the patch"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert sound.pack([1]) == "host"
    assert patching.status() == ()


def test_a_mismatch_fails_every_import_of_the_host(host: Host) -> None:
    host.write("stubhost/utils/packing.py", "def pack(lengths, budget): pass")
    patching.apply(host.patches)
    for _ in range(2):
        with pytest.raises(PatchError, match=r"stubhost.utils.packing.pack: expected"):
            host.load("stubhost.trainer")
    patching.revert(host.patches)
    assert host.load("stubhost.trainer")


def test_a_missing_module_fails_the_import_of_its_package(host: Host) -> None:
    (host.folder / "stubhost/utils/packing.py").unlink()
    patching.apply(host.patches)
    with pytest.raises(PatchError, match=r"expected a module stubhost.utils.packing, found none"):
        host.load("stubhost.utils")
    patching.revert(host.patches)
    host.load("stubhost.utils")
    with pytest.raises(PatchError, match=r"expected a module stubhost.utils.packing, found none"):
        patching.apply(host.patches)


def test_methods_are_replaced(host: Host) -> None:
    host.write("stubhost/classes.py", "class Packer:\n    def pack(self, lengths): return 'host'\n")
    path = host.patch(
        "stubhost.classes:Packer.pack", signature="(self, lengths)", replacement="pack_method"
    )
    packer = host.load("stubhost.classes").Packer()
    patching.apply(path)
    assert packer.pack([1]) == "megapack"
    patching.revert(path)
    assert packer.pack([1]) == "host"


LIBRARY = "stubhost.utils:pack"
TRAINER = "stubhost.trainer:pack"


@pytest.fixture
def library(host: Host) -> str:
    """A patch of a name that the package `stubhost.utils` re-exports and two modules import."""
    host.write("stubhost/utils/__init__.py", "from .packing import pack\n")
    for user in ("stubhost/trainer.py", "stubscript.py"):
        host.write(user, "from stubhost.utils import pack\n")
    return host.patch(LIBRARY, rebinds="everywhere")


@pytest.mark.parametrize("imported", [(), ("stubscript",), ("stubscript", "stubhost.trainer")])
def test_a_re_exported_name_is_rebound_everywhere(
    host: Host, library: str, imported: tuple[str, ...]
) -> None:
    early = [host.load(name) for name in imported]
    patching.apply(library)
    users = [host.load(name) for name in ("stubscript", "stubhost.trainer")]
    assert [user.pack for user in users] == [pack, pack]
    # The module that defines the name keeps it: the replacement may call it.
    original = host.load("stubhost.utils.packing").pack
    assert original([1]) == "host"
    assert patching.status()[0].stale == ()
    patching.revert(library)
    assert [user.pack for user in (*early, *users)] == [original] * (len(early) + 2)
    assert host.load("stubhost.utils").pack is original


def test_a_re_exported_name_stays_in_others_unless_everywhere(host: Host, library: str) -> None:
    script = host.load("stubscript")
    patching.apply(host.patch(LIBRARY))
    assert (script.pack([1]), host.load("stubhost.utils").pack([1])) == ("host", "megapack")


def test_what_everywhere_misses_is_stale(host: Host, library: str) -> None:
    """An import from the module that defines the name, after the patch."""
    script = host.load("stubscript")
    patching.apply(library)
    host.write("stublate.py", "from stubhost.utils.packing import pack\n")
    host.load("stublate")
    assert patching.status()[0].stale == ("stublate.pack",)
    assert script.pack is pack


def test_megapacks_own_modules_are_never_rebound(host: Host, library: str) -> None:
    ours = sys.modules["megapack.hosts.stub"]
    original = host.load("stubhost.utils").pack
    ours.original = original  # type: ignore[attr-defined]
    (status,) = patching.apply(library)
    assert (ours.original, status.stale) == (original, ())
    patching.revert(library)
    # Modules that imported the replacement itself keep it, like this one.
    assert ours.pack is globals()["pack"] is pack


@pytest.mark.parametrize("imported_first", [False, True])
@pytest.mark.parametrize("trainer_first", [False, True])
@pytest.mark.parametrize("revert_trainer_first", [False, True])
def test_a_patch_everywhere_and_one_of_a_copy_in_any_order(
    host: Host, library: str, imported_first: bool, trainer_first: bool, revert_trainer_first: bool
) -> None:
    """As megatron_core's patch and megatron_lm's, of the copy in megatron.training.training."""
    trainer_only = host.patch(TRAINER, replacement="pack_steps", host="stublm")
    if imported_first:
        host.load("stubhost.trainer")
    pair = [trainer_only, library] if trainer_first else [library, trainer_only]
    for path in pair:
        patching.apply(path)
    trainer = host.load("stubhost.trainer")
    script = host.load("stubscript")
    assert (trainer.pack, script.pack) == (pack_steps, pack)
    assert [(status.state, status.stale) for status in patching.status()] == [("applied", ())] * 2
    if revert_trainer_first:
        patching.revert(trainer_only)
        assert (trainer.pack, script.pack) == (pack, pack)
        patching.revert(library)
    else:
        patching.revert(library)
        assert (trainer.pack, script.pack([1])) == (pack_steps, "host")
        patching.revert(trainer_only)
    assert (trainer.pack([1]), script.pack([1])) == ("host", "host")


@pytest.mark.parametrize("signature", ["(lengths, *, budget=None)", "(*args, **kwargs)"])
def test_a_second_patch_is_verified_against_the_hosts_signature(
    host: Host, library: str, signature: str
) -> None:
    """Not against the signature of the replacement that it finds, `(*args, **kwargs)`."""
    patching.apply(host.patch(LIBRARY, replacement="pack_steps", rebinds="everywhere"))
    host.load("stubhost.trainer")
    second = host.patch(TRAINER, signature=signature, host="stublm")
    if signature == "(*args, **kwargs)":
        with pytest.raises(PatchError, match=r"found \(lengths, \*, budget=None\)"):
            patching.apply(second)
    else:
        assert [status.state for status in patching.apply(second)] == ["applied"]


def test_two_hosts_do_not_replace_the_same_name(host: Host) -> None:
    patching.apply(host.patches)
    other = host.patch("stubhost.utils.packing:pack", host="stubother")
    with pytest.raises(PatchError, match="already replaced by the patches for stubhost;"):
        patching.apply(other)


def test_a_name_replaced_by_others_is_lost_and_kept(host: Host) -> None:
    module = host.load("stubhost.utils.packing")
    patching.apply(host.patches)
    module.pack = theirs = lambda lengths: "theirs"
    assert patching.status()[0].state == "lost"
    patching.revert(host.patches)
    assert module.pack is theirs


def test_a_missing_replacement_is_refused(host: Host) -> None:
    path = host.patch("stubhost.utils.packing:pack", replacement="unpack")
    host.load("stubhost.utils.packing")
    with pytest.raises(PatchError, match=r"megapack.hosts.stub.unpack is missing"):
        patching.apply(path)


def test_a_replacement_must_be_defined_in_its_module(host: Host) -> None:
    """Else a patch file could name anything that a module of megapack.hosts imports."""
    path = host.patch("stubhost.utils.packing:pack", replacement="imported")
    ours = sys.modules["megapack.hosts.stub"]
    ours.imported = os.remove  # type: ignore[attr-defined]
    packing = host.load("stubhost.utils.packing")
    with pytest.raises(PatchError, match=r"stub.imported was not written in megapack.hosts.stub"):
        patching.apply(path)
    assert packing.pack([1]) == "host"


def test_a_replacement_finds_the_hosts_own_object(host: Host) -> None:
    module = host.load("stubhost.utils.packing")
    own = module.pack
    with pytest.raises(PatchError, match=r"stubhost\.utils\.packing\.pack is not replaced here"):
        patching.original("stubhost.utils.packing.pack")
    patching.apply(host.patches)
    assert module.pack is not own
    assert patching.original("stubhost.utils.packing.pack") is own
    patching.revert(host.patches)
    with pytest.raises(PatchError, match="apply its patch first"):
        patching.original("stubhost.utils.packing.pack")


def test_check_replaces_nothing(host: Host) -> None:
    assert [finding.problem for finding in patching.check(host.patches)] == [""]
    assert "stubhost.utils.packing" in sys.modules
    assert patching.status() == ()
    patching.apply(host.patches)
    assert [finding.problem for finding in patching.check(host.patches)] == [""]
    absent = host.patch("stubabsent.packing:pack", host="stubabsent")
    (finding,) = patching.check(absent)
    assert "No module named 'stubabsent'" in finding.problem


GOOD = {
    "target": "a.b:c",
    "signatures": ("()",),
    "replacement": "megapack.hosts.slime:build_dp_schedule",
    "why": "because",
}


@pytest.mark.parametrize(
    "change",
    [
        {"target": "a.b.c"},
        {"target": "a.b:c()"},
        {"signatures": ()},
        {"replacement": "os:system"},
        {"replacement": "megapack.hosts:slime"},
        {"replacement": "megapack.hosts.slime:a.b"},
        {"replacement": "megapack.hosts..os:system"},
        {"replacement": "megapack.hosts./../os:system"},
        {"replacement": "megapack.hosts_of_others.a:b"},
        {"replacement": "megapack.hosts.slime:build_dp_schedule\n"},
        {"replacement": " megapack.hosts.slime:build_dp_schedule"},
    ],
)
def test_bad_entries_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Replacement(**{**GOOD, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host: a\nseen: b\npatches: []\n", "has no patches"),
        ("host: a\nseen: b\npatches: !!python/name:os.system\n", "tags are refused"),
        ("host: a\nseen: b\n", "patches has no default"),
        ("host: a\nsene: b\npatches: []\n", "did you mean seen"),
        (
            "host: a\nseen: b\npatches: [{target: a:b, signatures: [()], rebinds: nowhere, "
            "replacement: megapack.hosts.slime:build_dp_schedule, why: c}]\n",
            "rebinds is 'nowhere', expected host or everywhere",
        ),
        ("host: A b\nseen: b\npatches: [{}]\n", "target has no default"),
    ],
)
def test_bad_patch_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        patching.apply(str(path))


@pytest.mark.parametrize(
    ("installed", "since", "fits"),
    [
        ("0.9.1", None, True),
        ("0.10.0rc1+cu13", "0.9", True),
        ("0.8.9", "0.9", False),
        (None, "0.9", True),
    ],
)
def test_a_patch_file_is_for_versions_from_one_on(
    installed: str | None, since: str | None, fits: bool
) -> None:
    file = PatchFile(
        host="a",
        seen="b",
        patches=(Replacement(**GOOD),),  # type: ignore[arg-type]
        distribution="no-such-distribution-is-installed",
        since=since,
    )
    assert file.version is None
    assert file.is_for(installed) is fits


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.1")
    with pytest.raises(ConfigError, match=r"megatron-bridge 0.3.1 is installed .* 0.4 and newer"):
        patch_set(["megatron_bridge"])
    left = patch_set(["slime", "megatron_bridge", "-megatron_bridge"])
    assert [file.host for file in left] == ["slime", "megatron_core"]


def test_an_older_version_is_a_finding_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.1")
    own = host.patch(TRAINER)
    wrong, *others = patching.check(own, "megatron_bridge")
    assert (wrong.target, "0.4 and newer" in wrong.problem) == ("megatron_bridge", True)
    assert [found.problem for found in others] == [""]


@pytest.mark.parametrize(
    ("names", "nearest"),
    [
        (["slmie"], "slime"),
        (["SLIME"], "slime"),
        (["nemo-rl"], "nemo_rl"),
        (["slime", "-megatron_coer"], "megatron_core"),
        (["-megatron_coer"], "megatron_core"),
    ],
)
def test_an_unknown_host_error_names_the_nearest_and_lists_all(
    names: list[str], nearest: str
) -> None:
    says = rf"no patches for '.*'; did you mean {nearest}\? There are areal, .*, xtuner"
    with pytest.raises(ConfigError, match=says):
        patching.apply(*names)


@pytest.mark.parametrize(
    "names", [["slime", "-slime", "-megatron_core"], ["megatron_lm", "-megatron_lm"]]
)
def test_names_that_leave_everything_out_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="all patches are left out; name one that stays"):
        patching.apply(*names)


@pytest.mark.parametrize("value", [",", " ", ",,", " , "])
def test_a_value_of_the_variable_that_names_nothing_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="names no host; set one, such as slime, or unset"):
        asked_hosts(value)
    assert asked_hosts("") == []


def hosts_of(*names: str) -> list[str]:
    return [file.host for file in patch_set(names)]


def test_a_host_brings_the_step_and_can_leave_it_out() -> None:
    assert hosts_of("slime") == ["slime", "megatron_core"]
    assert hosts_of("slime", "megatron_core", "slime_loss") == [
        "slime",
        "megatron_core",
        "slime_loss",
    ]
    assert hosts_of("slime", "-megatron_core") == ["slime"]
    assert hosts_of("megatron_lm") == ["megatron_lm"]
    # What is brought brings what it needs.
    assert hosts_of("verl_dynamic_cp") == ["verl_dynamic_cp", "verl", "megatron_core"]
    assert hosts_of("verl_dynamic_cp", "-megatron_core") == ["verl_dynamic_cp", "verl"]
    brought = r"-miles: nothing to leave out; the other names bring slime, megatron_core"
    with pytest.raises(ConfigError, match=brought):
        patch_set(["slime", "-miles"])


def test_apply_and_revert_take_what_a_host_brings(host: Host) -> None:
    own = host.patch(TRAINER, host="stubbing")
    text = Path(own).read_text()
    Path(own).write_text(text.replace("seen: now", "seen: now\nbrings: [megatron_core]"))
    assert [status.host for status in patching.apply(own)] == ["stubbing", "megatron_core"]
    patching.revert(own, "-megatron_core")
    assert [status.host for status in patching.status()] == ["megatron_core"]
    patching.revert(own)
    assert patching.status() == ()


def test_a_file_brings_shipped_hosts_only(host: Host) -> None:
    own = host.patch(TRAINER)
    Path(own).write_text(Path(own).read_text().replace("seen: now", "seen: now\nbrings: [mine]"))
    with pytest.raises(ConfigError, match="no patches for 'mine'"):
        patch_set([own])


def any_default(a: int, b: object = object()) -> None:
    """The second default has no text that could be compared."""


@pytest.mark.parametrize(
    ("function", "text", "same"),
    [
        (lambda a, /, b, *c, d, e=1, **f: 0, "(a, /, b, *c, d, e=1, **f)", True),
        (lambda a, b=(1, "x"): 0, "(a, b=(1, 'x'))", True),
        (lambda a, b=True: 0, "(a, b=1)", False),
        (lambda a, b: 0, "(a, b=...)", False),
        (lambda a, *, b: 0, "(a, b)", False),
        (lambda a: 0, "(b)", False),
        (lambda a, b: 0, "(a)", False),
        (any_default, "(a, b=...)", True),
        (Host, "(folder, monkeypatch)", True),
    ],
)
def test_signatures_are_compared(function: Callable[..., object], text: str, same: bool) -> None:
    assert is_like(signature_of(function), parse_signature(text)) is same


@pytest.mark.parametrize("text", ["a, b", "(a, a)", "(a=print())", "(a): pass\nimport os\ndef g()"])
def test_text_that_is_not_a_signature_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a signature"):
        parse_signature(text)


@pytest.mark.parametrize(
    ("host_name", "index"),
    [(name, i) for name in shipped_hosts() for i in range(len(read_patches(name).patches))],
)
def test_a_replacement_accepts_the_hosts_arguments(host_name: str, index: int) -> None:
    entry = read_patches(host_name).patches[index]
    module, _, name = entry.replacement.partition(":")
    replacement = getattr(importlib.import_module(module), name)
    assert replacement.__module__ == module
    ours = signature_of(replacement)
    if entry.argument is not None:
        ours.bind(None)
    for text in entry.signatures:
        parameters = parse_signature(text).parameters.values()
        passed = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        by_name = {p.name: None for p in passed if p.kind is p.KEYWORD_ONLY}
        ours.bind(*(None for p in passed if p.name not in by_name), **by_name)
        # A method's self is never passed by name.
        positional = [None] if "." in entry.name else []
        named = {p.name: None for p in passed[len(positional) :]}
        ours.bind(*positional, **named)


@pytest.mark.parametrize("host_name", ["miles", "nemo_rl", "skyrl", "slime", "verl"])
def test_the_page_of_a_host_lists_its_patches(host_name: str) -> None:
    pages = Path(__file__).resolve().parents[2] / "docs" / "hosts"
    lines = (pages / f"{host_name}.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| Replaced |")]
    entries = [entry for entry in read_patches(host_name).patches if entry.signatures]
    for entry in entries:
        assert re.search(rf"\b{entry.name.rpartition('.')[2]}`", row)
    known = {part for entry in entries for part in entry.dotted.split(".")}
    assert set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", row)))) <= known
