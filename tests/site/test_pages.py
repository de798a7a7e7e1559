"""The site in a browser: nothing sticks out of a narrow screen, and there are two themes."""

import pytest

from tests.browser import look, look_at_all, needs_browser

# What is wider than the screen and not inside of something that scrolls by itself.
STICKING_OUT = """
const width = document.documentElement.clientWidth;
const scrolls = element => {
    for (let e = element.parentElement; e && !e.matches('.md-content'); e = e.parentElement)
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
};
const content = document.querySelector('.md-content');
return {
    width,
    text: content.innerText.length,
    wider: document.documentElement.scrollWidth - width,
    out: [...content.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e))
        .map(e => `${e.tagName} ${e.textContent.slice(0, 60)}`),
};
"""


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_overflows(site, width):
    pages = [path for path in sorted(site.glob("*.html")) if path.name != "404.html"]
    assert len(pages) > 15
    for page, seen in look_at_all(pages, STICKING_OUT, width=width).items():
        assert seen["width"] == width
        assert seen["text"] > 400, page.name
        assert (seen["wider"], seen["out"]) == (0, []), page.name


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_and_can_be_changed(site, dark):
    seen = look(
        site / "explorer.html",
        """
        const picture = document.getElementById('ex-k').getContext('2d');
        const pixel = () => [...picture.getImageData(0, 15, 1, 1).data];
        const now = () => ({
            scheme: document.body.getAttribute('data-md-color-scheme'),
            paper: getComputedStyle(document.body).backgroundColor, zero: pixel().slice(0, 3),
        });
        const before = now();
        const shown = [...document.querySelectorAll('label.md-header__button[for^=__palette]')];
        shown.find(label => !label.hidden).click();
        await new Promise(resolve => setTimeout(resolve, 300));
        return [before, now()];
        """,
        dark=dark,
    )
    light = {"scheme": "default", "paper": "rgb(255, 255, 255)", "zero": [242, 242, 242]}
    slate = {"scheme": "slate", "zero": [44, 48, 58]}
    for found, wanted in zip(seen, (slate, light) if dark else (light, slate), strict=True):
        assert found | wanted == found
    assert seen[0]["paper"] != seen[1]["paper"]
