"""Prompts from a class of the user's (--data-source-path), in the place of `PromptSource`.

    class Source:                      # made once, with the options, when the rollout process starts
        def take(self, count): ...     # the next `count` rows: what a line of a prompt file says, or the prompt alone
        def state(self): ...           # where it stands, as JSON
        def restore(self, state): ...  # continue there

Invariants: a row of the class is checked, rendered and tokenized by what reads files, so whatever leaves here can be
sampled; a snapshot holds the rows of all groups that are not trained yet, so a resumed run needs nothing again of
what the class has given, and asks it for the next; whatever the class raises or returns is one error that names the
option, and the prompt's number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.custom_functions import named
from hpcrl.config.options import Options
from hpcrl.errors import DataError, HpcrlError
from hpcrl.rollout.custom_hooks import expect, plain_json, read_metrics
from hpcrl.rollout.prompts.prompt_files import Drawn, PromptFile
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.row_checks import Keys
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.slime_names.arguments import Arguments

MOST_DROPPED = 1000  #: prompts in a row that are too long before it is an error
TYPES = "rm_types"  #: attribute of the class: the rewards that its rows' metadata may name


class CustomSource:
    """Hands out groups of what the class gives.  own: its object."""

    def __init__(self, options: Options, tokenizer: Tokenizer, function: Callable[..., Any]) -> None:
        """Raise UsageError if it cannot be made, or lacks a method."""
        self._path = options.data_source_path
        self._shown = f"--data-source-path {options.data_source_path}"
        self._keys = Keys.from_options(options)
        self._tokenizer = tokenizer.given(options.apply_chat_template_kwargs)
        if self._keys.chat_template:
            self._tokenizer.need_template()
        with named(self._shown):
            self.own = function(Arguments(options))
        # group -> (the prompt's number, its row), of those that are handed out and not known to be trained or dropped
        self._rows: dict[int, tuple[int, dict[str, Any]]] = {}
        self._next = self._given = self._dropped = 0
        what = "a list of names of rewards is wanted"
        types = getattr(self.own, TYPES, ())
        self._types = expect(f"{self._shown}.{TYPES}", types, what, lambda found: tuple(map(str.strip, found)))

    def file(self) -> PromptFile:
        """As a file of unknown length is for code that counts prompts, or loads the rewards that they name.

        Raises:
            UsageError: if its length, which it need not have, is not a number.
        """
        types = dict.fromkeys(self._types, f"{self._shown}: its {TYPES}") if self._keys.own_types else {}
        return PromptFile(Path(str(self._path)), (), 0, "", types=types)

    def length(self) -> int | None:
        """How many prompts an epoch has, None where the class does not say."""
        if not hasattr(type(self.own), "__len__"):
            return None
        with named(self._shown):
            return len(self.own)

    # ---- handing out

    def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups.

        Raises:
            DataError: names an invalid prompt, HpcrlError what the class raises.
        """
        taken: list[Group] = []
        dropped = 0
        while len(taken) < count:
            rows = self._call_source(count - len(taken))
            first = self._given
            self._given = self._given + len(rows)
            given = _Given(self._shown, [(first + at, self._row(first + at, row)) for at, row in enumerate(rows)])
            drawn = Drawn(given, self._keys, self._tokenizer)
            kept = drawn.check().tolist()
            self._check_types(drawn)
            for at in kept:
                self._rows[self._next] = first + at, given[at]
                taken.append(Group(self._next, drawn[at]))
                self._next += 1
            dropped = 0 if kept else dropped + len(rows)
            self._dropped += len(rows) - len(kept)
            if dropped >= MOST_DROPPED:
                raise DataError(
                    f"{self._shown}: {dropped} prompts in a row are longer than the limit of {drawn.limit} tokens",
                    f"raise {self._keys.flags}",
                )
        return taken

    def _call_source(self, count: int) -> list[Any]:
        with named(f"{self._shown}: take({count})"):
            rows = self.own.take(count)
        if not isinstance(rows, list | tuple) or len(rows) != count:
            many = f" of {len(rows)}" if isinstance(rows, list | tuple) else ""
            raise HpcrlError(
                f"{self._shown}: take({count}) returned {type(rows).__name__}{many}, expected a list of {count} rows",
                "an exhausted source must begin again",
            )
        return list(rows)

    def _row(self, number: int, row: Any) -> dict[str, Any]:
        """A row as a file would have it: what JSON makes of it."""
        row = dict(row) if isinstance(row, Mapping) else {self._keys.input: row}
        return plain_json(f"{self._shown}, prompt {number + 1}", row)

    def _check_types(self, drawn: Drawn) -> None:
        for name, where in drawn.types.items():
            if name not in self._types:
                raise DataError(
                    f"{where}: metadata rm_type is {name!r}, which the class's {TYPES} does not have",
                    f"rewards are loaded when the run starts: declare {TYPES} = [{name!r}] in the class",
                )

    def again(self, numbers: Sequence[int]) -> list[Group]:
        """Those of these groups that were handed out before the snapshot, and not trained; the others the class gives
        in its turn."""
        wanted = sorted(number for number in numbers if number < self._next)
        if missing := [number for number in wanted if number not in self._rows]:
            raise DataError(
                f"the checkpoint does not hold the prompt of group {missing[0]}", "resume from another checkpoint"
            )
        given = _Given(self._shown, [self._rows[number] for number in wanted])
        drawn = Drawn(given, self._keys, self._tokenizer)
        return [Group(number, drawn[at]) for at, number in enumerate(wanted)]

    def metrics(self) -> dict[str, float]:
        """data/dropped: prompts that were too long; and what the class's `metrics`, if it has one, says, as data/..."""
        found = {"data/dropped": float(self._dropped)}
        if not callable(function := getattr(self.own, "metrics", None)):
            return found
        with named(f"{self._shown}: metrics()"):
            more = function()
        return found | read_metrics(f"{self._shown}: metrics()", more, "data/")

    # ---- across a restart

    def state(self, alive: Collection[int] | None = None) -> dict[str, Any]:
        """Where the class stands, and the rows of the groups `alive` (None: all that are kept), as plain JSON.

        The rows of others are forgotten: they are trained or dropped.
        """
        with named(f"{self._shown}: state()"):
            own = self.own.state()
        own = plain_json(f"{self._shown}: state()", own)
        if alive is not None:
            self._rows = {number: self._rows[number] for number in sorted(alive) if number in self._rows}
        rows = [[number, given, row] for number, (given, row) in sorted(self._rows.items())]
        counts = {"next_group": self._next, "given": self._given, "dropped": self._dropped}
        return counts | {"source": self._path, "own": own, "rows": rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: if it is of another source.
        """
        if state.get("source") != self._path:
            raise DataError(
                f"the checkpoint's data position is that of {state.get('source') or 'prompt files'}, not of "
                f"{self._shown}",
                "give the same source, or start a new run with --load",
            )
        try:
            following, given, dropped = (int(state[key]) for key in ("next_group", "given", "dropped"))
            rows = {int(number): (int(at), dict(row)) for number, at, row in state["rows"]}
            own = state["own"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the checkpoint's data position is damaged: {error!r}", "resume from another checkpoint"
            ) from error
        with named(f"{self._shown}: restore()"):
            self.own.restore(own)
        self._next = following
        self._given = given
        self._dropped = dropped
        self._rows = rows


@dataclass
class _Given:
    """Prompts of the class, each with its number from 0, as rows of a file."""

    shown: str
    rows: list[tuple[int, dict[str, Any]]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index][1]

    def where(self, index: int) -> str:
        return f"{self.shown}, prompt {self.rows[index][0] + 1}"
