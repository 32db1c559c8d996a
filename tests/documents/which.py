"""Which test runs which documented command.

Invariant: every command is in exactly one of three places: it is cheap (`cheap`), it is asked of a finished run
(`of_a_run`), or `ELSEWHERE` names the test that shows it, with the reason why these tests cannot.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.documents.texts import Command, of_help

#: what starts something, and has a --dry-run
DRY = ("run", "submit", "launch", "eval")
#: what starts nothing
FREE = ("plan", "hostfile", "options", "completion", "import", "--version", "--help", "status")
#: what is asked of a run
OF_A_RUN = (
    "status",
    "watch",
    "logs",
    "samples",
    "engines",
    "report",
    "stop",
    "cancel",
    "resume",
    "convert",
)


def shown_elsewhere() -> dict[str, tuple[str, str]]:
    """Command -> (reason, test)."""
    rows = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text())["command"]
    return {line: (row["reason"], row["test"]) for row in rows for line in row["lines"]}


def helped() -> list[Command]:
    """The commands of `hpcrl --help`."""
    from hpcrl.cli.main import HELP

    return of_help(HELP, "hpcrl --help")


def cheap(command: Command) -> bool:
    """Whether nothing of it need start for it to be tried."""
    if command.line in shown_elsewhere() or "RUN" in command.words:
        return False
    return command.words[0] == "hpcrl" and command.verb in (*DRY, *FREE)


def dry(words: list[str]) -> list[str]:
    """The words of a command that starts something, so that it starts nothing."""
    if words[1] not in DRY or {"--dry-run", "--print", "--help"} & set(words):
        return words
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], "--dry-run", *words[end:]]


def of_a_run(command: Command) -> bool:
    """Whether it is asked of a run."""
    return command.verb in OF_A_RUN and "RUN" in command.words and command.line not in shown_elsewhere()


def conversion(command: Command) -> bool:
    """Whether it converts weights from one directory to another."""
    return command.verb == "convert" and "RUN" not in command.words and command.line not in shown_elsewhere()
