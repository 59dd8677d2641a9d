"""A page as one HTML file that needs no network: it contains its style, script and numbers."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from megapack.job.view.page_data import Page

_CHARTS = ("unit", "steps", "curves", "histograms")


def page_html(page: Page) -> str:
    """The content of the HTML file. Text from plans and runs is escaped."""
    payload = asdict(page)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in page.notes)
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in page.facts
    )
    parts = {
        "TITLE": html.escape(page.title),
        "FACTS": facts,
        "NOTES": notes,
        "STYLE": _resource("report.css"),
        "SCRIPT": _resource("report.js"),
        "DATA": _inline_json({key: payload[key] for key in _CHARTS}),
    }
    # The template is split once, so that inserted text is not searched for markers.
    pieces = _resource("report.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _inline_json(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return (resources.files("megapack.job.view") / "web" / name).read_text(encoding="utf-8")
