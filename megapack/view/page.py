"""A page as one HTML file that needs no network: style, script and numbers are in it."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from megapack.view.page_data import Page


def page_html(page: Page) -> str:
    """The file. All that comes from plans and runs is escaped."""
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
    # One pass over the template: what is filled in is not searched again.
    pieces = _resource("report.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


_CHARTS = ("unit", "steps", "curves", "histograms")


def _inline_json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return (resources.files("megapack.view") / "web" / name).read_text(encoding="utf-8")
