"""Runs code on a rank.

python -m tests.dist.run_code CODE
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
