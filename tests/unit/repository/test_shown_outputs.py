"""What counts as the output that a document shows."""

from __future__ import annotations

import pytest

from tests.shown_outputs import difference

pytestmark = pytest.mark.unit

PRINTED = """\
512 samples, dp=2
plan 29c99ff463d0: M = 4, 4
step 1/8: loss -0.0853  grad 0.338  7837 tokens/s
step 2/8: loss -0.0504  grad 0.211  8328 tokens/s
8 steps; wrote runs/a
"""


@pytest.mark.parametrize(
    "shown",
    [
        PRINTED,
        PRINTED.replace("  ", " "),
        "512 samples, dp=2\n...\nstep 2/8: loss -0.05  grad 0.2  ...\n8 steps; wrote runs/a",
        "...\n8 steps; ...",
        "512 samples...\n...",
        "...\nstep 1/8: loss -0.0853 ... tokens/s\n...\n8 steps; wrote runs/a\n",
    ],
)
def test_an_output_is_what_is_shown(shown: str) -> None:
    assert difference(shown, PRINTED) is None


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        (PRINTED.replace("0.338", "0.339"), None),
        (PRINTED.replace("29c9", "29c8"), None),
        (PRINTED.replace("grad", "norm"), None),
        (PRINTED.replace("512", "511"), None),
        (PRINTED + "more", None),
        ("512 samples, dp=2", None),
        ("512 samples, dp=2\n...\nstep 2/8: loss -0.06 ...\n...", "step 2/8: loss -0.06 ..."),
        ("...\nstep 2/8: ...", "step 2/8: ..."),
        ("...\nstep 2/8: ...\n...\nstep 1/8: ...\n...", "step 1/8: ..."),
        ("samples\n...", "samples"),
    ],
)
def test_another_output_is_not(shown: str, wrong: str | None) -> None:
    assert difference(shown, PRINTED) == (wrong or shown.strip("\n"))


def test_numbers_are_rounded_to_what_is_shown() -> None:
    assert difference("1.4", "1.3999") is None
    assert difference("1.4", "1.4501") == "1.4"
    assert difference("2e-05", "1.96e-05") is None
    assert difference("1.40", "1.4") is None
    assert difference("3,550", "3,551") == "3,550"
