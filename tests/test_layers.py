"""Which tests run in which layer (tests/support/layers.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import layers


@pytest.mark.lint
def test_every_entry_of_the_table_fits_a_test() -> None:
    """An entry of a test that has another name now would leave the test in another layer.

    `make lint` collects all files; a session of some files checks the entries of those.
    """
    fitted = {layers.entry_of(name) for name in layers.collected}
    folders = {
        str(parent) for name in layers.collected for parent in (Path(name.partition("::")[0]), *Path(name).parents)
    }
    lost = {entry for entry in layers.table() if entry not in fitted and entry.partition("::")[0] in folders}
    missing = {entry for entry in layers.table() if not (layers.TESTS / entry.partition("::")[0]).exists()}
    assert not lost | missing, sorted(lost | missing)


@pytest.mark.parametrize(
    ("marks", "layer"),
    [(set(), "core"), ({"process"}, "full"), ({"cluster"}, "full"), ({"process", "core"}, "core"), ({"lint"}, "lint")],
)
def test_marks_decide_unless_the_table_does(monkeypatch: pytest.MonkeyPatch, marks: set[str], layer: str) -> None:
    monkeypatch.setattr(layers, "table", lambda: {"a": "soak", "a/test_b.py::test_c[x]": "core"})
    assert layers.layer_of("d/test_e.py::test_f", marks) == layer
    assert layers.layer_of("a/test_b.py::test_c[y]", {"process"}) == "soak"
    assert layers.layer_of("a/test_b.py::test_c[x]", {"process"}) == "core"
    assert layers.layer_of("a/test_b.py::test_c[x]", {"soak"}) == "soak"


def test_more_skipped_tests_than_recorded_fail_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "baseline.toml").write_text('[skipped]\ncore = 3\n"full and cluster" = 0\n')
    monkeypatch.setattr(layers, "TESTS", tmp_path)
    monkeypatch.setenv("HPCRL_REQUIRE", "git")
    assert not layers.too_many_skipped("core", 3) and not layers.too_many_skipped("", 9)
    assert "allows 3" in layers.too_many_skipped("core", 4) and layers.too_many_skipped("full and cluster", 1)
    monkeypatch.delenv("HPCRL_REQUIRE")
    assert not layers.too_many_skipped("core", 4)
