"""What the tests of options share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcrl.config import passthrough


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A login node: neither Megatron-core nor vLLM is installed."""
    monkeypatch.setattr(passthrough, "locate", lambda package: ())
    for cached in (passthrough.settings, passthrough.spellings):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (passthrough.settings, passthrough.spellings):
        cached.cache_clear()
