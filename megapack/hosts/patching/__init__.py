"""Replace names of another training framework by megapack's.

Modules:
    registry: apply, revert, status, check, original: the patches of this process
    files: the patch files in patches/
    target: one name of a host: verify, replace, restore
"""

from megapack.hosts.patching.registry import Finding, apply, check, original, revert, status
from megapack.hosts.patching.target import Status

__all__ = [
    "Finding",
    "apply",
    "check",
    "original",
    "revert",
    "status",
    "Status",
]
