"""`hpcrl samples`: what was asked and answered, what it earned, and what the trainer made of it.

Invariant: it only reads; text of a model can do nothing to the terminal; colours on a terminal alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcrl.cli.find_run import find_run
from hpcrl.errors import UsageError
from hpcrl.report import sample_view as view
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.report.sample_records import Look, Reading, held_out_sets, read_looks, steps_of
from hpcrl.report.status_text import on_terminal
from hpcrl.utils.arguments import RUN, Parser
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import as_given

COUNT = 3


class StepSamples(NamedTuple):
    """Samples of one step of one stage.

    Attributes:
        name: as the user wrote it.
    """

    stage: StageFiles
    step: int
    held_out: str | None
    name: str

    @property
    def title(self) -> str:
        return f"evaluation {self.held_out} {view.after_steps(self.step)}" if self.held_out else f"step {self.step}"

    def looks(self, reading: Reading) -> Iterator[Look]:
        return read_looks(self.stage.root, self.step, self.held_out, reading)


def samples(argv: list[str]) -> int:
    """`hpcrl samples`: some samples of a step, or of an evaluation; or two steps, or runs, side by side."""
    args = _arguments(argv)
    if args.count < 1:
        raise UsageError(f"-n {args.count} is less than 1", "give a number from 1")
    reading = Reading()
    run = find_run(args.run)
    lines = _two(run, args, reading) if args.diff else _one(run, args, reading)
    show(lines)
    if reading.damaged:
        print(f"hpcrl: note: {reading.damaged} damaged lines were left out", file=sys.stderr)
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser("samples", "Prompts, responses, rewards; advantage, and the log-probs of trainer and engine.")
    parser.add_argument("run", metavar="RUN", help=f"{RUN}; or the directory of a stage")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this step, counted from 0; with --eval after so many steps; default: the last",
    )
    parser.add_argument(
        "--eval", metavar="NAME", help="of an evaluation of this held-out set, after --step steps (0: before the first)"
    )
    parser.add_argument("--group", type=int, metavar="G", help="only of this group: the responses to one prompt")
    parser.add_argument("-n", "--count", type=int, default=COUNT, metavar="COUNT", help=f"how many ({COUNT})")
    which = parser.add_mutually_exclusive_group()
    for name, text in (
        ("worst", "the least reward first"),
        ("best", "the greatest first"),
        ("truncated", "those that were cut off"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, default="first", help=text)
    parser.add_argument(
        "--transcript",
        action="store_true",
        help="each turn: output of the policy, its input, and its actions in sandboxes",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="what both answered to the same prompts; a number is a step of RUN, anything else another run (RUN:STEP)",
    )
    args = parser.parse_args(argv)
    for name, given in (
        ("--transcript", args.transcript),
        (f"--{args.which}", args.which != "first"),
        ("--group", args.group is not None),
    ):
        if args.diff and given:
            raise UsageError(f"{name} has no effect with --diff", "leave it out")
    return args


# ---- which samples


def _place(run: Run, word: str, step: int | None, held_out: str | None, inside: Path | None = None) -> StepSamples:
    """The step `step`, by default the last, of the run.

    Args:
        inside: a stage's directory that was named; else the last stage that has such samples.

    Raises:
        UsageError: says what there is.
    """
    stages = [stage for stage in run.stages if inside in (None, stage.root)]
    found = {stage.name: steps_of(stage.root, held_out) for stage in stages}
    having = [stage for stage in stages if (step in found[stage.name] if step is not None else found[stage.name])]
    if having:
        return StepSamples(having[-1], found[having[-1].name][-1] if step is None else step, held_out, word)
    shown = strip_control(word)
    every = sorted({number for steps in found.values() for number in steps})
    if held_out is not None and not every:
        sets = sorted({name for stage in stages for name in held_out_sets(stage.root)})
        raise UsageError(
            f"{shown} has no samples of the evaluation set {held_out}", f"there are {', '.join(sets) or 'none yet'}"
        )
    if not every:
        raise UsageError(f"{shown} has no samples yet", "see hpcrl status")
    what = f"step {step}" if held_out is None else f"an evaluation {held_out} after {step} steps"
    raise UsageError(f"{shown} has no samples of {what}", f"there are {view.numbers(every)}")


def _inside(word: str) -> Path | None:
    """The directory of a stage, if a word names one."""
    path = Path(word)
    return as_given(path) if (path / "options.json").exists() and not (path / "recipe.json").exists() else None


def _one(run: Run, args: argparse.Namespace, reading: Reading) -> Iterator[view.Line]:
    place = _place(run, args.run, args.step, args.eval, _inside(args.run))
    which: view.Which = args.which
    found = view.choose(place.looks(reading), which, args.count, args.group)
    if not found:
        kind = "truncated samples" if which == "truncated" else "samples"
        what = kind if args.group is None else f"group {args.group}"
        yield (view.Word(f"{place.title} has no {what}"),)
    for look in found:
        yield from view.sample_lines(look, f"{place.title}, ", args.transcript)


def _two(run: Run, args: argparse.Namespace, reading: Reading) -> Iterator[view.Line]:
    first, second = (_named(run, word, args) for word in args.diff)
    found = view.pairs(first.looks(reading), second.looks(reading))
    names = (first.name, second.name)
    if not found:
        hint = "compare an evaluation, with the same prompts each time: --eval NAME" if not args.eval else ""
        raise UsageError(f"{names[0]} and {names[1]} have no prompt in common", hint)
    yield view.summary_line(found, names)
    yield ()
    for pair in found[: args.count]:
        yield from view.pair_lines(pair, names)


def _named(run: Run, word: str, args: argparse.Namespace) -> StepSamples:
    """What a word of --diff names: a step of the run, another run, or RUN:STEP."""
    if word.removeprefix("-").isdigit():
        place = _place(run, args.run, int(word), args.eval, _inside(args.run))
        return place._replace(name=place.title)
    other, colon, step = word.rpartition(":")
    if colon and step.removeprefix("-").isdigit():
        return _place(find_run(other), other, int(step), args.eval, _inside(other))._replace(name=strip_control(word))
    return _place(find_run(word), word, args.step, args.eval, _inside(word))._replace(name=strip_control(word))


# ---- on the screen


def show(lines: Iterable[view.Line]) -> None:
    """Print them: in colour on a terminal, plain elsewhere."""
    if not on_terminal(sys.stdout):
        for line in lines:
            print("".join(word.text for word in line))
        return
    from rich.text import Text

    from hpcrl.report.terminal import console

    screen = console(sys.stdout)
    for line in lines:
        text = Text(overflow="fold")
        for word in line:
            text.append(word.text, word.style)
        screen.print(text)
