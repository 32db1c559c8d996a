"""The pages as a site, built as `make lint` has it, and the README: every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.texts import REPO

pytestmark = [pytest.mark.lint, pytest.mark.process]


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: every page is in the menu, every link and anchor is there.  A page fetches nothing from another host."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPO, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) == len(list((REPO / "docs").glob("*.md")))
    for page in pages:
        fetched = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not fetched, f"{page}: {fetched}"


def test_readme_is_short_and_its_links_exist() -> None:
    text = (REPO / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (REPO / link).exists()] == []
