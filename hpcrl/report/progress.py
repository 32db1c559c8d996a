"""Progress on the screen: of a stage, whose metrics.jsonl the launcher follows, and of a conversion.

Invariant: it only reads, and reads every byte once; on a terminal it is one bar and the numbers that matter below it,
elsewhere a line every few seconds, so that a job's log stays readable.  Until the first step is done it says what is
waited for.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hpcrl.report.file_tail import FileTail
from hpcrl.report.metrics import held_out_means, measure, parse_record, step_rows, tokens_per_sec
from hpcrl.report.not_learning import WINDOW, not_learning
from hpcrl.report.run_status import awaited
from hpcrl.report.status_text import on_terminal
from hpcrl.run.peers import TrainerPeer, find
from hpcrl.run.rundir import RunDir
from hpcrl.run.skipped_checkpoints import read_passed_over
from hpcrl.utils.plain_text import strip_control

if TYPE_CHECKING:
    from hpcrl.report.terminal import ProgressBar

EVERY = 15.0  #: seconds between lines where there is no terminal
AGAIN = 30.0  #: seconds after which what is still waited for is said again there
GLANCE = 1.0  #: seconds between looks at the file
Item = TypeVar("Item")

#: metric -> how it is shown
SHOWN = {
    "rollout/reward": "reward {:.3f}",
    "train/loss": "loss {:.3f}",
    "rollout/response_len/mean": "length {:.1f}",
    "staleness/max": "staleness {:.0f}",
    "perf/tokens_per_sec": "{:.0f} tok/s",
}


class Progress:
    """One bar for one stage.

    Attributes:
        total: rollouts; the trainer corrects it if it is not known before.
    """

    def __init__(self, rundir: RunDir, title: str, total: int | None) -> None:
        self.rundir = rundir
        self.title = title
        self.total = total
        self.done = 0
        self.latest: dict[str, Any] = {}
        self.accuracy: dict[str, float] = {}
        self._measure = ""
        self._tail = FileTail(rundir.metrics_file)
        self._looked = 0.0
        self._begun = self._told = self._said = time.monotonic()
        self._line = ""
        self._working = False
        self._warned = False
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._noted: set[str] = set()
        self._awaits = ""
        self._bar = _bar(strip_control(title), total)
        self._closed = False

    def poll(self) -> None:
        """Look at the run and bring the screen up to date.  Cheap: may be called as often as one likes."""
        now = time.monotonic()
        if now - self._looked >= GLANCE:
            self._looked = now
            self._draw_if_due()
            if self._bar is not None:
                self._draw(self._bar)
            elif now - self._told >= EVERY:
                self._tell(now)

    def _draw_if_due(self) -> None:
        while lines := self._tail.new():
            for row in filter(None, map(parse_record, lines)):
                if step_rows([row]):
                    self.latest = row
                    self._note(row)
                    self.done = row["rollout_id"] + 1
                if means := held_out_means(row):
                    self.accuracy |= means
                    self._measure = measure([row])
        if not self._working and (trainer := find(self.rundir, TrainerPeer)):
            self._working = True
            self.total = trainer.total
            self.done = max(self.done, trainer.start)
            self._warn()
        self._awaits = "" if self.latest else awaited(self.rundir)

    def _note(self, row: dict[str, Any]) -> None:
        """Say once what shows that nothing is learned."""
        self._rows.append(row)
        found = not_learning(list(self._rows))
        for metric in found.keys() - self._noted:
            say(f"note: {found[metric]}")
        self._noted |= found.keys()

    def _warn(self) -> None:
        """Say once what this attempt has passed over when it resumed."""
        found = () if self._warned else read_passed_over(self.rundir.root)
        self._warned = True
        for one in found:
            if one.attempt == self.rundir.attempt:
                print(f"warning: {strip_control(one.text)}", file=sys.stderr, flush=True)

    def _draw(self, bar: ProgressBar) -> None:
        phase = "" if self._working else " (starting)"
        if self.total and self.done >= self.total and not self._closed:
            phase = " (ending)"  # the last save and evaluation, and the end of every process
        bar.show(strip_control(self.title + phase), self.done, self.total, strip_control(self.text() or self._awaits))

    def _tell(self, now: float) -> None:
        """A line, unless it would say the same again; of what is waited for now and then, so that a log shows that it
        is."""
        count = (
            "" if self.total == 0 else f"{self.done}/{'?' if self.total is None else self.total}  "
        )  # an evaluation alone
        waits = self._awaits if self._working else f"starting: {self._awaits}"
        line = f"{self.title}: {count}{self.text() or waits}"
        if line != self._line or (self._awaits and now - self._said >= AGAIN):
            _print_line(line, now - self._begun)
            self._said = now
        self._line = line
        self._told = now

    def text(self) -> str:
        """The latest numbers in one line."""
        row = dict(self.latest)
        if "rollout/reward" in row:  # the policy loss is 0 where its ratios are 1: it says nothing
            row.pop("train/loss", None)
        row["perf/tokens_per_sec"] = tokens_per_sec(row)
        parts = [how.format(row[name]) for name, how in SHOWN.items() if row.get(name) is not None]
        return ", ".join([*parts, *(f"{name} {self._measure} {value:.2f}" for name, value in self.accuracy.items())])

    def close(self) -> None:
        """Show where the stage ended."""
        self._draw_if_due()
        self._warn()
        self._closed = True
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.close()
        else:
            self._tell(time.monotonic())


class Meter:
    """How far a conversion is. A context.

    Attributes:
        total: how many units, bytes if `size` is given.
    """

    def __init__(self, title: str, total: int, unit: str, size: bool = False) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.size = size
        self.done = 0
        self._begun = time.monotonic()
        self._shown = self._begun

    def __enter__(self) -> Self:
        self._bar = _bar(self.title, self.total, self.size)
        return self

    def __exit__(self, *_: Any) -> None:
        self._show(time.monotonic())
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        now = time.monotonic()
        if now - self._shown >= (EVERY if self._bar is None else GLANCE):
            self._show(now)

    def _show(self, now: float) -> None:
        self._shown = now
        if self._bar is not None:
            self._bar.show(self.title, self.done, self.total)
        elif self.size:
            scale, unit = (1e6, "MB") if self.total >= 1e6 else (1e3, "kB")
            _print_line(f"{self.title}: {self.done / scale:.0f} of {self.total / scale:.0f} {unit}", now - self._begun)
        else:
            _print_line(f"{self.title}: {self.done} of {self.total} {self.unit}", now - self._begun)


def track(items: Iterable[Item], total: int, title: str, unit: str) -> Generator[Item, None, None]:
    """The items, while a `Meter` counts them; who does not take them all closes it."""
    with Meter(title, total, unit) as meter:
        for item in items:
            yield item
            meter.add(1)


def _bar(title: str, total: int | None, size: bool = False) -> ProgressBar | None:
    """A bar on stderr; None if it is not a terminal."""
    if not on_terminal(sys.stderr):
        return None
    from hpcrl.report.terminal import ProgressBar

    return ProgressBar(sys.stderr, title, total, size)


def _print_line(text: str, passed: float) -> None:
    minutes, seconds = divmod(int(passed), 60)
    print(f"{text}  [{minutes:02d}:{seconds:02d}]", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line of the launcher, for its user."""
    print(f"hpcrl: {text}", file=sys.stderr, flush=True)
