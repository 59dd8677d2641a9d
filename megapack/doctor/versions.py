"""Whether versions of packages are too old, or newer than what megapack is tested with."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from megapack.base import megatron

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

NEWEST_TESTED = {
    "python": "3.12",
    "torch": "2.13.0",
    "megatron-core": megatron.NEWEST_TESTED,
    "transformer-engine": "2.11.0",
}
"""The newest version of each package with which megapack's tests have run."""


def check_version(package: str, version: str) -> tuple[list[str], list[str]]:
    """Faults and notes about an imported package's version.

    A version below the range that megapack requires is a fault. A newer one than the tests have run
    with is a note, because it may well work.
    """
    from packaging.version import Version

    # NVIDIA's containers have builds such as 2.6.0a0+ecf3bae, which no range of releases contains.
    release = Version(Version(version).base_version)
    newest = Version(NEWEST_TESTED[package])
    # A later 3.12.x is still the Python 3.12 that was tested.
    if release > newest and release.release[: len(newest.release)] != newest.release:
        return [], [
            f"version {version} is newer than {newest}, the newest that tests have run with"
        ]
    required = _required(package)
    if required is None or required.contains(release):
        return [], []
    return [f"version {version}; install {package}{required}"], []


def freed_while_sent(version: str) -> list[str]:
    """A note if this megatron-core frees outputs of interleaved stages before they are sent."""
    if not megatron.frees_while_sending(version):
        return []
    return [
        f"virtual pipeline stages of megatron-core {version} free an output while it is being "
        "sent: over gloo they train wrongly; set config.deallocate_pipeline_outputs=False, or "
        "apply the patch megatron_core, or install 0.18.2"
    ]


def _required(package: str) -> SpecifierSet | None:
    """The range of a package that megapack requires; None if it has none."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("megapack") or []]
    except metadata.PackageNotFoundError:  # a source tree has no metadata
        return None
    return next((one.specifier for one in requirements if one.name == package), None)
