"""`hpcrl watch --web`: the page of a run as it is now, behind the key in its address."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hpcrl.cli import main
from hpcrl.errors import UsageError
from hpcrl.report.page import live
from hpcrl.report.page.live import LivePages
from tests.support.rundirs import log, steps


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LivePages, list[int]]]:
    """Pages that count how often they were made; no browser is waited for at the end."""
    monkeypatch.setattr(live, "LINGER", 0.0)
    count: list[int] = []
    with LivePages(lambda: count.append(1) or f"<p>{len(count)}</p>") as pages:
        yield pages, count


def asked(pages: LivePages, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """(status, body, headers) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(pages.address).port or 0, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_is_behind_its_key(made: tuple[LivePages, list[int]]) -> None:
    pages, count = made
    key = urlsplit(pages.address).path
    status, body, headers = asked(pages, key)
    assert (status, body) == (200, "<p>1</p>") and headers["Cache-Control"] == "no-store"
    for path in ("/", "/wrong/", key[:-2], f"{key}x", "/../", f"//{key}/x"):
        assert asked(pages, path)[0] == 404, path
    assert asked(pages, key, "POST")[0] == 501
    assert len(key) > 20 and len(count) == 1


def test_many_requests_make_one_page(made: tuple[LivePages, list[int]]) -> None:
    pages, count = made
    key = urlsplit(pages.address).path
    threads = [threading.Thread(target=asked, args=(pages, key)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(count) == 1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port}"):
            LivePages(lambda: "", port)


def test_watch_serves_what_the_run_has_become(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of the fixture has ended: the browser that looks gets the last page, and watch ends."""
    bodies: list[str] = []
    monkeypatch.setattr(live, "LINGER", 0.0)
    enter = LivePages.__enter__

    def entered(self: LivePages) -> LivePages:
        enter(self)
        log(run, *steps(1, first=3, **{"rollout/mine": 7.0}))
        bodies.append(asked(self, urlsplit(self.address).path)[1])
        return self

    monkeypatch.setattr(LivePages, "__enter__", entered)
    assert main(["watch", str(run), "--web"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"http://127\.0\.0\.1:\d+/\S{20,}/\n.*ssh -L", said)
    assert 'http-equiv="refresh"' in bodies[0] and "rollout/mine" in bodies[0] and "<script" not in bodies[0]
    assert main(["watch", str(run), "--port", "80"]) == 2
