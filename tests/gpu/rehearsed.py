"""Whether these tests are rehearsed on a CPU: the variable REHEARSE of `tools/gpu_check.sh`.

"1": everything, in smaller sizes and with more time. "sample": one attention only.
"""

from __future__ import annotations

import os

REHEARSED = bool(os.environ.get("REHEARSE"))
SAMPLED = os.environ.get("REHEARSE") == "sample"
