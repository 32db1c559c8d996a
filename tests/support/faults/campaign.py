"""One fault after another: the run is started or gone on with, struck at a drawn moment, and looked at; at its end
another begins.

Invariant: what happens depends on the seed and on how fast the machine is, never on what an earlier fault has shown; a
fault that has shown something wrong is recorded, and the next one strikes a fresh run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from hpcrl.run.attempt_log import faults_of, read_attempts
from tests.support.faults.beds import Bed, Missed
from tests.support.faults.checks import Reference, wrong_in
from tests.support.faults.kinds import Kind, Struck

#: seconds until a run trains; until a run that is at work has trained another step
START = 240.0
STEP = 300.0
EARLY = 0.55  #: share of the faults that come while the run starts
GOES_ON = 600.0  #: seconds that a run may take to its end without further faults


@dataclass
class Record:
    """A fault, for the log.  step: rollouts done when it struck; seconds: until all was over, or the run had shown that
    it goes on."""

    number: int
    bed: str
    seed: int
    kind: str
    victim: str = ""
    early: bool = False
    attempt: int = -1
    step: int = 0
    seconds: float = 0.0
    error: str = ""
    wrong: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    """N faults on one bed.  references: the untouched run of a shape; log: gets a line of JSON for each fault; kept:
    whether the launcher is to begin the next attempt itself after a fault that ends one."""

    name: str
    seed: int
    bed: Bed
    kinds: Sequence[Kind]
    reference: Reference
    folder: Path
    log: TextIO
    count: int
    most: float = float("inf")  #: seconds after which no further fault is begun
    kept: bool = False
    records: list[Record] = field(default_factory=list)
    began: float = 0.0
    start: float = 20.0  #: seconds that the last start took
    before: int = -1  #: the last attempt that is over
    runs: int = 0
    running: bool = False

    def run(self) -> list[Record]:
        """All of it; the records."""
        chance = random.Random(f"{self.name} {self.seed}")
        until = time.monotonic() + self.most
        try:
            for _ in range(10 * self.count):  # some find nobody to strike
                if len(self.records) < self.count and time.monotonic() < until:
                    drawn = random.Random(chance.random())
                    self._fault(drawn.choices(self.kinds, [kind.weight for kind in self.kinds])[0], drawn)
            if self.running:
                self._to_the_end()
        finally:
            if self.runs:
                self.bed.close()
        return self.records

    def each(self) -> list[Record]:
        """Every kind once, in order, on one run to its end; the records."""
        chance = random.Random(self.seed)
        try:
            for kind in self.kinds:
                self._fault(kind, chance)
            self._to_the_end()
        finally:
            self.bed.close()
        return self.records

    # ---- one fault

    def _fault(self, kind: Kind, chance: random.Random) -> None:
        self._be_at_work()
        record = Record(len(self.records), self.name, self.seed, kind.name)
        try:
            record.early = self._moment(chance, kind)
            record.attempt = max(self.bed.attempt, self.before + 1)
            record.step = self.bed.steps()
            engines = self._engines()
            at = time.monotonic()
            struck = kind.strike(self.bed, chance)
            record.victim = struck.victim
            self._outcome(kind, struck, record)
            record.seconds = round(time.monotonic() - at, 1)
            if (
                self.kept
                and kind.engines_live
                and not record.early
                and self.bed.at_work()
                and self._engines() != engines
            ):
                record.wrong.append(f"an engine has not lived through it: {engines}, then {self._engines()}")
        except Missed:
            return
        except AssertionError as error:
            record.wrong.append(str(error))
        self.records.append(record)
        print(json.dumps(asdict(record)), file=self.log, flush=True)
        if record.wrong:
            self._keep()
            self._fresh()

    def _engines(self) -> list[int]:
        """The processes of engines' servers."""
        return sorted(process.pid for process in self.bed.find("hpcrl.engine.server"))

    def _keep(self) -> None:
        """What tells of a run in which something was wrong, but for its checkpoints."""
        with contextlib.suppress(OSError, shutil.Error):
            where = self.folder / f"wrong-{len(self.records)}"
            shutil.copytree(self.bed.root, where, symlinks=True, ignore=shutil.ignore_patterns("*.distcp"))
            (where / "said").write_text(self.bed.said())

    def _be_at_work(self) -> None:
        """A run that is under way, which may be a new one."""
        if self.running and self.bed.at_work():
            return
        self.began = time.monotonic()
        if self.running and self.bed.finished():
            self._to_the_end()
        if self.running:
            if (self.bed.root / "recipe.json").exists():
                self.before = self.bed.attempt
                self.bed.go_on()
                return
            self._fresh()  # it was struck before it had a directory
        self.runs = self.runs + 1
        self.before = -1
        self.bed.begin(self.folder / f"run-{self.runs}")
        self.running = True

    def _fresh(self) -> None:
        self.bed.close()
        self.running = False

    def _moment(self, chance: random.Random, kind: Kind) -> bool:
        """Wait for the moment; whether it is while the run starts.  Missed if the run ends before."""
        early = chance.random() < EARLY
        wait = chance.random()
        more = chance.randrange(8)
        if kind.early and early and not self._training():
            while time.monotonic() < self.began + wait * self.start and not self._training():
                time.sleep(self.bed.look)
            return not self._training()  # this start may have been quicker than the last
        first, wished = not self._training(), 0

        def there() -> bool:
            nonlocal wished
            if not self.bed.at_work():
                raise Missed("it has ended")
            if not wished and self._training():
                wished = self.bed.steps() + more
            return bool(wished) and self.bed.steps() >= wished

        self.bed.until(there, START, "training")
        if first:
            self.start = 0.5 * self.start + 0.5 * (time.monotonic() - self.began)
        time.sleep(wait * 0.5)
        if not self.bed.at_work():
            raise Missed("it has ended")
        return False

    def _training(self) -> bool:
        """Whether the run trains since it was last started."""
        return self.bed.attempt > self.before and self.bed.training()

    def _outcome(self, kind: Kind, struck: Struck, record: Record) -> None:
        """See the run end, or go on; then look at everything.  AssertionError if it does neither."""
        root = self.bed.root
        if kind.ends and self.kept:
            struck.heal()
            self._continues(kind, record)
        elif kind.ends:
            try:
                self.bed.until(
                    lambda: self._over(record.attempt), kind.seconds, f"{kind.name} ({struck.victim}): the end"
                )
            finally:
                struck.heal()
            self._see_them_gone(record.attempt, 20, kind.name)
            self.before = record.attempt
            record.error = self.bed.error(record.attempt) or self.bed.said().strip().rpartition("\n")[2]
            words = f"{self.bed.said()}\n{self.bed.error(record.attempt)}"
            finished = self.bed.finished() and not self.bed.at_work()
            spoke = (
                bool(self.bed.said().strip()) or self.bed.attempt >= record.attempt
            )  # else it was struck before its first line
            if spoke and not finished and not re.search(kind.says, words, re.IGNORECASE):
                record.wrong.append(f"{kind.says!r} is not in what it said: {words[-600:]}")
            if (
                spoke
                and not finished
                and struck.host
                and not re.search(rf"(host|from|on) {struck.host}\b(?! was told)", record.error)
            ):
                record.wrong.append(f"{struck.host} is not what the error names: {record.error}")
        else:
            struck.heal()
            before = self.bed.steps()
            if self.bed.training():
                self.bed.until(
                    lambda: self.bed.steps() > before or not self.bed.at_work(), STEP, f"{kind.name}: another step"
                )
            if not self.bed.at_work() and not self.bed.finished():
                record.wrong.append(f"it has ended: {self.bed.said()[-600:]}")
        record.wrong += wrong_in(root, self.reference)
        if kind.orderly and not self.bed.at_work() and self.bed.attempt >= record.attempt:
            record.wrong += [f"{name} is left" for name in self.bed.left()]

    def _continues(self, kind: Kind, record: Record) -> None:
        """See another attempt train on, in the same job."""

        def trains() -> bool:
            later = self.bed.attempt > record.attempt and self.bed.training()
            return later or not self.bed.at_work()

        self.bed.until(trains, kind.seconds + START, f"{kind.name}: another attempt trains")
        record.error = self.bed.error(record.attempt)
        if not self.bed.at_work() and not self.bed.finished():
            record.wrong.append(f"the job has ended: {self.bed.said()[-900:]}")
        elif self.bed.at_work():
            old = [line for line in self._stale(record.attempt) if ".trainer." in line or ".rollout." in line]
            record.wrong += [f"{line} is left" for line in old]
        for fault in faults_of(read_attempts(self.bed.root)):
            if fault.attempt >= record.attempt and (fault.repeated or 0) > 1:
                record.wrong.append(f"{fault.repeated} steps of attempt {fault.attempt} were made again")

    def _over(self, attempt: int) -> bool:
        """Whether nobody works on with what was struck: the run has ended, or a later attempt has begun."""
        return not self.bed.at_work() or self.bed.attempt > attempt

    def _stale(self, attempt: int) -> list[str]:
        """Processes of the attempt that is over, or of any if nobody is at work."""
        found = self.bed.processes()
        if self.bed.at_work():
            found = [
                p for p in found if "--attempt" in p.argv and int(p.argv[p.argv.index("--attempt") + 1]) <= attempt
            ]
        return [f"{process.host} {process.pid} {' '.join(process.argv)}" for process in found]

    def _see_them_gone(self, attempt: int, seconds: float, after: str) -> None:
        """Wait until no process of the attempt is left.  AssertionError names those that are."""
        try:
            self.bed.until(lambda: not self._stale(attempt), seconds, f"{after}: processes are left")
        except AssertionError as error:
            raise AssertionError("\n".join([*self._stale(attempt), str(error)])) from None

    # ---- the end of a run

    def _to_the_end(self) -> None:
        """Let the run come to its end, and compare all of it; a record of its own tells what was wrong then."""
        record = Record(len(self.records) - 1, self.name, self.seed, "the end of the run", attempt=self.bed.attempt)
        try:
            struck = self.before >= self.bed.attempt  # and what the killed leave goes at the next start
            swept = self.bed.again or not (struck and self.bed.finished())  # else a later run on these hosts finds it
            if not self.bed.finished() or (struck and swept and self.bed.left()):
                if not self.bed.at_work():
                    self.bed.go_on()
                record.attempt = self.bed.attempt + 1
            self.bed.until(lambda: not self.bed.at_work(), GOES_ON, "the end of the run")
            assert self.bed.finished(), f"it did not finish: {self.bed.said()[-2000:]}\n{self.bed.logs()}"
            self._see_them_gone(record.attempt, 15, "the end")
            record.step = self.bed.steps()
            record.wrong += wrong_in(self.bed.root, self.reference, finished=True)
            record.wrong += [f"{name} is left" for name in self.bed.left() if swept]
        except AssertionError as error:
            record.wrong.append(str(error))
        if record.wrong:
            self.records.append(record)
            self._keep()
        print(json.dumps(asdict(record)), file=self.log, flush=True)
        self._fresh()


def table(records: Sequence[Record]) -> str:
    """kind, count, seconds until all was over, how many were wrong."""
    lines = [f"{'fault':<50} {'count':>5} {'early':>5} {'seconds':>11} {'wrong':>5}"]
    for kind in sorted({record.kind for record in records}):
        some = [record for record in records if record.kind == kind]
        spent = sorted(record.seconds for record in some)
        counts = Counter(early=sum(r.early for r in some), wrong=sum(bool(r.wrong) for r in some))
        lines.append(
            f"{kind:<50} {len(some):>5} {counts['early']:>5} {spent[0]:>5.1f}-{spent[-1]:<5.1f} {counts['wrong']:>5}"
        )
    return "\n".join([*lines, f"{'all':<50} {len(records):>5} {sum(r.early for r in records):>5}"])


def open_log(folder: Path) -> TextIO:
    """Where the lines of JSON go: the file that FAULTS_LOG names, or one in `folder`."""
    path = Path(os.environ.get("FAULTS_LOG") or folder / "faults.jsonl")
    print(f"log: {path}")
    return path.open("a")
