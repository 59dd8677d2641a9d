"""Checks that no page of a built site loads anything from another machine.

    python tools/check_site.py build/site

Links that a reader may follow are allowed. Prints each page and what it would load; the exit code
is 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
# URLs that a stylesheet loads.
CSS_LOAD = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
# Values of rel with which a <link> loads nothing.
RELATIONS = {"canonical", "next", "prev", "alternate"}


class Loads(HTMLParser):
    """Collects what a page loads by itself.

    A mermaid diagram counts, because the theme fetches a script for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "link" and values.get("rel") not in RELATIONS:
            self._add(values.get("href", ""))
        for name in ("src", "srcset", "poster", "data"):
            if name in values:
                self._add(values[name])
        self.found += CSS_LOAD.findall(values.get("style", ""))
        if "mermaid" in values.get("class", "").split():
            self.found.append("a mermaid diagram")

    def _add(self, url: str) -> None:
        if ELSEWHERE.match(url):
            self.found.append(url)


def loads(path: Path) -> Iterator[str]:
    """URLs that a page or stylesheet would load from another machine."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        parser = Loads()
        parser.feed(text)
        yield from parser.found
    yield from CSS_LOAD.findall(text)


def main(site: Path) -> int:
    """Check every page and stylesheet of a site."""
    pages = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    if not pages:
        print(f"{site}: no pages; build them with tools/docs.sh", file=sys.stderr)
        return 2
    found = [(page.relative_to(site), url) for page in pages for url in loads(page)]
    for page, url in found:
        print(f"{page} loads {url}", file=sys.stderr)
    print(f"{site}: {len(pages)} pages and stylesheets, {len(found)} loads from elsewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
