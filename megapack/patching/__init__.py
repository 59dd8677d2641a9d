"""Replacing names of another training framework by megapack's, politely.

applied  apply, revert, status, check
files    the patch files in patches/
target   one name: verified, replaced, put back
"""

from megapack.patching.applied import Finding, apply, check, revert, status
from megapack.patching.target import Status

__all__ = [
    "Finding",
    "apply",
    "check",
    "revert",
    "status",
    "Status",
]
