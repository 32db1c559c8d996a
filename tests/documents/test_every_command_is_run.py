"""Every documented command of hpcrl is run by some test, and every recipe is in a documented command."""

from __future__ import annotations

from tests.documents.texts import REPO, Command, alternatives, printed, recipes
from tests.documents.which import DRY, cheap, conversion, dry, helped, of_a_run, shown_elsewhere


def test_every_command_is_run_somewhere() -> None:
    """A page that gains a command that no test can take must say who shows it: in `which.py`, with the reason."""
    commands = [*printed(), *helped()]
    places = {c.line: (cheap(c), of_a_run(c), conversion(c), c.line in shown_elsewhere()) for c in commands}
    assert [line for line, found in places.items() if sum(found) != 1] == []
    lines = {command.line for command in commands}
    stale = [line for line in shown_elsewhere() if line not in lines]
    assert not stale, f"no page has these any more: {stale}"
    for line, (reason, test) in shown_elsewhere().items():
        file, _, name = test.partition("::")
        assert reason and (REPO / file).is_file(), f"{line}: {test} is not there"
        assert not name or f"def {name}(" in (REPO / file).read_text(), f"{line}: {file} has no {name}"


def test_every_recipe_says_how_it_is_run() -> None:
    named = " ".join(command.line for command in printed())
    assert [str(recipe.relative_to(REPO)) for recipe in recipes() if str(recipe.relative_to(REPO)) not in named] == []


def test_synopses_are_read() -> None:
    assert alternatives("hpcrl eval A|B [--site S]") == [
        "hpcrl eval A",
        "hpcrl eval B",
        "hpcrl eval A --site S",
        "hpcrl eval B --site S",
    ]
    assert alternatives("hpcrl convert WHAT ...") == ["hpcrl convert WHAT"]
    assert dry(["hpcrl", "run", "--lr", "1", "--", "--lr"]) == ["hpcrl", "run", "--lr", "1", "--dry-run", "--", "--lr"]
    assert all(Command(f"hpcrl {verb} recipe.toml", "").verb in DRY for verb in DRY)
