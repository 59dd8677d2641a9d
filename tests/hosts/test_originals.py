"""Replacements that call the host's own function find it."""

from __future__ import annotations

import pytest

from megapack import PatchError, patching
from tests.hosts.stub import Host

pytestmark = pytest.mark.hosts


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
