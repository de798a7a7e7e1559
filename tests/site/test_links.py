"""Every link of the site and of the README leads somewhere, without asking the network."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from tests.site.conftest import ROOT

OUTSIDE = ("https://", "http://", "mailto:", "data:", "javascript:")


class Page(HTMLParser):
    """The places of a page that can be linked to, and its links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.places |= {found[key] for key in ("id", "name") if key in found}
        if tag in ("a", "link") and "href" in found:
            self.links.append(found["href"])
        if "src" in found:
            self.links.append(found["src"])
        # What the page needs to be seen: nothing of it may come from elsewhere.
        if tag in ("script", "img", "iframe") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found["href"])


def test_links_of_the_site(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 15
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(OUTSIDE):
                continue
            address, place = urldefrag(link)
            target = (path.parent / unquote(address)).resolve() if address else path
            has_place = not place or target not in pages or unquote(place) in pages[target].places
            if not (target.is_file() and has_place):
                broken.append((path.name, link))
    assert broken == []


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        if path.name != "404.html":  # which may be shown at any address, and so has absolute ones
            assert [link for link in Page(path).loaded if link.startswith(OUTSIDE[:2])] == []


def test_links_of_pages_outside_the_site():
    for path in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
            address, place = urldefrag(link)
            if link.startswith(OUTSIDE):
                continue
            target = ROOT / address if address else path
            assert target.exists(), (path.name, link)
            assert not place or place in _headings(target), (path.name, link)


def _headings(page: Path) -> set[str]:
    """The places of a page in Markdown, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
