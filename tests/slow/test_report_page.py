"""The report in a browser: every panel is drawn, in light and dark, wide and narrow."""

from __future__ import annotations

import html
import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule
from megapack.job.view.page import page_html, plan_page, run_page
from megapack.job.view.records import read_run
from tests.run_folder import write_run

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
]
HEIGHT = 3200
# Values of Chromium's preferredColorScheme.
DARK = 0
LIGHT = 1
BLUE = (0x56, 0xB4, 0xE9)
ORANGE = (0xE6, 0x9F, 0x00)
DEEP_BLUE = (0x00, 0x72, 0xB2)

# PROBE_HEAD records errors. PROBE_END runs after drawing: it records the panels' positions, and
# whether buttons and keys change the timeline.
PROBE_HEAD = """<script>
window.faults = [];
window.addEventListener("error", (event) => window.faults.push(String(event.message)));
</script>"""
PROBE_END = """<script>
const canvas = document.getElementById("canvas");
const press = (id) => { document.getElementById(id).click(); return canvas.toDataURL(); };
const key = (name) => {
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
  return canvas.toDataURL();
};
const all = canvas.toDataURL(), zoomed = press("in"), moved = key("ArrowRight");
const back = press("all");
// The first forward of the first stage, below the axis and the track's name.
const corner = canvas.getBoundingClientRect();
const at = { clientX: corner.x + 2, clientY: corner.y + AXIS + LABEL + LANE / 2 };
canvas.dispatchEvent(new PointerEvent("pointermove", at));
document.body.dataset.found = JSON.stringify({
  faults: window.faults,
  zooms: zoomed !== all && moved !== zoomed && back === all,
  tip: document.getElementById("tip").textContent,
  overflow: document.documentElement.scrollWidth - innerWidth,
  panels: [...document.querySelectorAll("canvas, svg")].map((panel) => {
    const { x, y, width, height } = panel.getBoundingClientRect();
    return [x, y, width, height].map(Math.round);
  }),
});
</script>"""


def chromium(page: Path, width: int, scheme: int, *args: str) -> str:
    """Open a page in headless Chromium; returns its standard output."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={width},{HEIGHT}",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--virtual-time-budget=2000",
        *args,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def show(page_text: str, folder: Path, width: int, scheme: int) -> tuple[dict[str, Any], Any]:
    """The probe's findings, and the screenshot's pixels as uint8 [height, width, 3]."""
    import matplotlib.image

    # The page's content security policy allows inline scripts, so the probe runs.
    probed = page_text.replace("</title>", "</title>" + PROBE_HEAD)
    probed = probed.replace("</body>", PROBE_END + "</body>")
    page = folder / "report.html"
    picture = folder / "shot.png"
    page.write_text(probed)
    dom = chromium(page, width, scheme, "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, dom[-500:]
    chromium(page, width, scheme, f"--screenshot={picture}")
    image = matplotlib.image.imread(io.BytesIO(picture.read_bytes()))
    return json.loads(html.unescape(found[1])), (image[..., :3] * 255).round().astype(np.uint8)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [
        ("run", 1200, LIGHT),
        ("plan", 500, DARK),
        *(
            pytest.param(kind, width, scheme, marks=pytest.mark.weekly)
            for kind, width, scheme in itertools.product(
                ["run", "plan"], [1200, 500], [LIGHT, DARK]
            )
            if (kind, width, scheme) not in [("run", 1200, LIGHT), ("plan", 500, DARK)]
        ),
    ],
)
def test_no_panel_is_empty(tmp_path: Path, kind: str, width: int, scheme: int) -> None:
    text, num_panels = run_report(tmp_path) if kind == "run" else plan_report()
    found, pixels = show(text, tmp_path, width, scheme)
    assert found["faults"] == []
    assert found["zooms"]
    assert found["tip"].startswith("forward of micro-batch 0\nplanned, rank ")
    assert found["overflow"] <= 0
    assert len(found["panels"]) == num_panels
    ground = pixels[2, 2].astype(int)
    assert (ground.mean() < 64) == (scheme == DARK)
    # The timeline comes first, then charts of one colour each.
    colours = [(BLUE, ORANGE)] + [(BLUE if scheme == DARK else DEEP_BLUE,)] * (num_panels - 1)
    for (x, y, panel_width, panel_height), drawn in zip(found["panels"], colours, strict=True):
        assert panel_width > 100
        assert y + panel_height < HEIGHT
        panel = pixels[y : y + panel_height, x : x + panel_width].astype(int)
        for colour in drawn:
            share = (np.abs(panel - colour).sum(axis=-1) < 90).mean()
            assert share > 0.001, f"the panel at {x}, {y} is empty"


def run_report(folder: Path) -> tuple[str, int]:
    """The report of a run and its number of panels: a timeline, five curves, three histograms."""
    return page_html(run_page(read_run(write_run(folder / "run")), None)), 9


def plan_report() -> tuple[str, int]:
    """The report of a plan for many ranks and its number of panels: a timeline, two curves, three
    histograms."""
    lengths = [64 + (i * 7919) % 900 for i in range(2048)]
    plan = build_dp_schedule(
        lengths, layout=Layout(dp=64, pp=2), max_tokens_per_gpu=2048, num_steps=2
    )
    return page_html(plan_page(plan, np.array(lengths), CostModel(per_token=1.0), "s")), 6
