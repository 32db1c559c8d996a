"""The pages in a real browser, at three widths, in light and in dark: nothing overlaps, nothing is cut off, the width is
used, and text can be read.

The browser measures a copy of the page, whose policy against scripts is taken out for a script that measures.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from tests.report.page.test_comparison import one_run
from tests.support.able import needs

pytestmark = [
    pytest.mark.process,
    needs("chromium"),
]
WIDTHS = (500, 1000, 1500)
#: what is asked of the page: boxes of the parts of each title, the width that charts take, colours
MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
const words = e => { const range = document.createRange(); range.selectNodeContents(e.firstChild); return box(range) };
const style = getComputedStyle(document.body);
const reading = document.querySelector(".at text");
document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify({
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  wide: document.documentElement.scrollWidth, view: innerWidth,
  captions: [...document.querySelectorAll("figcaption")].map(c => [words(c), ...[...c.querySelectorAll(".key")].map(box)]),
  body: box(document.body), charts: [...document.querySelectorAll("figure svg")].map(box),
  ink: style.color, paper: style.backgroundColor,
  colours: [...document.querySelectorAll("polyline")].map(e => getComputedStyle(e).stroke),
  hidden: getComputedStyle(reading).visibility, ids: document.querySelectorAll("[id]").length,
})}));
</script></body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run and one of ten, as a browser is to measure them."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        one_run(folder / f"a-rather-long-name-{n}", n * 1e-6, [0.1, 0.1 * n, 0.2], "text " * 50) for n in range(1, 11)
    ]
    assert main(["report", str(runs[0]), "-o", str(folder / "one.html")]) == 0
    assert main(["report", *map(str, runs), "-o", str(folder / "ten.html")]) == 0
    for name in ("one", "ten"):
        page = folder / f"{name}.html"
        text, policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
        assert policies == 1
        page.write_text(text.replace("</body>", MEASURE))
    return {name: folder / f"{name}.html" for name in ("one", "ten")}


def measured(page: Path, width: int, dark: bool, home: Path) -> dict[str, Any]:
    """What the browser found."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}", *scheme]
    command += [f"--window-size={width},2000", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def luminance(colour: str) -> float:
    """Of rgb(...), as WCAG 2 has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21 (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def apart(one: list[float], other: list[float]) -> bool:
    """Whether two boxes (left, top, right, bottom) do not overlap by more than a pixel."""
    return one[2] <= other[0] + 1 or other[2] <= one[0] + 1 or one[3] <= other[1] + 1 or other[3] <= one[1] + 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["one", "ten"])
def test_a_page_at_three_widths(name: str, dark: bool, pages: dict[str, Path], tmp_path: Path) -> None:
    for width in WIDTHS:
        found = measured(pages[name], width, dark, tmp_path / str(width))
        where = f"{name}, {width} wide"
        assert found["dark"] is dark and found["wide"] <= found["view"], f"{where}: nothing is cut off at the right"
        assert len(found["charts"]) >= 2 and found["hidden"] == "hidden"
        for boxes in found["captions"]:
            assert all(apart(a, b) for at, a in enumerate(boxes) for b in boxes[at + 1 :]), f"{where}: {boxes}"
        right = max(box[2] for box in found["charts"])
        columns = len({box[0] for box in found["charts"]})
        fits = min(len(found["charts"]), int((found["body"][2] - found["body"][0]) // 360))
        assert columns >= max(1, fits), f"{where}: {columns} columns"
        assert fits < len(found["charts"]) or columns == len(found["charts"]) or right > found["body"][2] * 0.9
        assert contrast(found["ink"], found["paper"]) > 7, where
        assert all(contrast(colour, found["paper"]) > 3 for colour in found["colours"]), where
