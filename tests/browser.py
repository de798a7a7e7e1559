"""Pages in a browser without a window, for tests that look at them; they are skipped where there is none."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

# A page tells the one around it what was seen in it, and the browser prints that. Errors are caught from the
# first script on.
_HEAD = """<script>
const errors = [];
const missing = ({target}) => `${target.src || target.href} is missing`;
window.addEventListener('error', event => errors.push(event.message || missing(event)), true);
</script>"""
_LOOK = """<script>
window.addEventListener('load', () => setTimeout(async () => {
  const look = async () => { %s };
  const seen = await look().catch(error => { errors.push(String(error)); return null; });
  parent.postMessage({name: location.pathname.split('/').pop(), seen, errors}, '*');
}, 200));
</script>"""
_FRAMES = """<!doctype html><body style="margin: 0">
<script>
const said = {};
addEventListener('message', ({data}) => {
  said[data.name] = data;
  document.getElementById('seen').textContent = JSON.stringify(said);
});
</script><pre id="seen"></pre>%s"""


def look(page: Path, script: str, *, width: int = 1280, dark: bool = False) -> Any:
    """What a script sees in a page: what it returns, as JSON. Errors on the page fail the test."""
    return look_at_all([page], script, width=width, dark=dark)[page]


def look_at_all(pages: list[Path], script: str, *, width: int = 1280, dark: bool = False) -> dict[Path, Any]:
    """The same for several pages of one folder at once.

    Each is in a frame, which may be narrower than any window.
    """
    probed = {page: page.with_name(f"probed_{page.name}") for page in pages}
    frames = pages[0].with_name("frames.html")
    frame = f'<iframe src="%s" width="{width}" height="1600" style="border: 0"></iframe>'
    frames.write_text(_FRAMES % "".join(frame % path.name for path in probed.values()), "utf-8")
    for page, path in probed.items():
        text = page.read_text("utf-8").replace("<head>", f"<head>{_HEAD}", 1)
        path.write_text(text + _LOOK % script, "utf-8")
    colours = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", colours]
    options += ["--window-size=1400,1700", "--virtual-time-budget=20000"]
    command = [CHROMIUM, *options, "--dump-dom", frames.as_uri()]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        for path in (*probed.values(), frames):
            path.unlink()
    said = json.loads(unescape(re.search(r'<pre id="seen">(.*?)</pre>', found, re.DOTALL).group(1)))
    for path in probed.values():
        assert path.name in said, f"nothing was heard of {path.name}"
        assert said[path.name]["errors"] == [], path.name
    return {page: said[path.name]["seen"] for page, path in probed.items()}
