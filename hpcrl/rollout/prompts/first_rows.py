"""A look at the first rows of the prompt files that a run begins with, before anything of it is made.

Invariant: what is refused here the roles would refuse too; what cannot be known here (a file that is yet to be made, or
that other machines alone can see, the length of a prompt in tokens) is left to them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord, read_words
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.prompts.row_checks import ASSISTANT, Keys, PromptRow, keys_in, read_row
from hpcrl.rollout.prompts.rows import open_rows
from hpcrl.sandbox.harbor.rows import TaskRows
from hpcrl.sandbox.harbor.task import CONFIG
from hpcrl.utils.check_results import Finding

AGENT = "hpcrl.rollout.samplers.harbor_agent.generate"  #: what works at tasks, unless the user's own function does
FIRST = 100  #: rows of each file that are looked at
SLICED = 1 << 26  #: bytes of the largest file whose slices are checked, which reads all of it


def look_at(stages: Sequence[Options]) -> None:
    """Raise UsageError or DataError for the first thing that is wrong with the held-out sets or the prompt files of
    these stages; say what is odd about them on stderr.
    """
    for options in stages:
        for word, keys in _files(options):
            if note := _check_rows(options, word, keys):
                print(f"hpcrl: note: {note}", file=sys.stderr)


def prompt_files(options: Options) -> Iterator[str]:
    """The path of every prompt file of a stage."""
    yield from (word.path for word, _ in _files(options))


def findings(stages: Sequence[Options]) -> Iterator[Finding]:
    """The same as findings, one for each prompt file that is here."""
    for options in stages:
        try:
            for word, keys in _files(options):
                if Path(word.path).exists():
                    if note := _check_rows(options, word, keys):
                        yield Finding("warn", "", note)
                    looked = (
                        "every task can be run" if Path(word.path).is_dir() else "its first rows have what they must"
                    )
                    yield Finding("ok", "", f"prompts in {word.path}: {looked}")
        except HpcrlError as error:
            yield Finding("fail", "", error.what, error.hint)


def _files(options: Options) -> Iterator[tuple[PromptWord, Keys]]:
    """Every prompt file of a stage, and where its rows have what."""
    if not options.only_evaluates and options.load_debug_rollout_data is None and options.data_source_path is None:
        keys = Keys.from_options(options)
        yield from ((word, keys) for word in read_words(options.prompt_data, "--prompt-data"))
    if (
        options.eval_interval is not None
        and not options.trains_only
        and (options.eval_config is None or Path(options.eval_config).is_file())
    ):
        yield from ((held.word, Keys.of_set(held)) for held in eval_sets(options))


def _check_rows(options: Options, word: PromptWord, keys: Keys) -> str:
    """What is odd about the first rows, "" if nothing.

    Raises:
        DataError: if there are none, or one is not as it must be.
    """
    path = Path(word.path)
    if path.is_dir():
        _look_at_tasks(options, word, keys)
        return ""
    if not path.is_file() or (path.suffix == ".parquet" and find_spec("pyarrow") is None):
        return ""
    if not word.whole and path.stat().st_size > SLICED:
        return ""
    rows = open_rows(word, FIRST if word.whole else None)
    looked = ((rows.where(at), rows[at]) for at in range(min(FIRST, len(rows))))
    notes = [_oddity(where, read_row(where, row, keys), keys) for where, row in looked]
    return next(filter(None, notes), "")


def _oddity(where: str, row: PromptRow, keys: Keys) -> str:
    """What is odd about a row that may nevertheless be meant so; "" if nothing."""
    if row.messages and row.messages[-1]["role"] == ASSISTANT and not keys.conversation:
        return f"{where}: the prompt ends with a message of the assistant, so the model is shown the answer"
    if isinstance(row.raw, str) and re.match(r"\s*\[\s*\{\s*\"(role|content)\"", row.raw):
        return f"{where}: the prompt is JSON text of messages, and is taken as the text of one; write it as a list"
    return ""


def _look_at_tasks(options: Options, word: PromptWord, keys: Keys) -> None:
    """Raise DataError for the first task that cannot be run here, UsageError where no function would run any, or if
    our agent would be ended before a task's own time is over."""
    rows = open_rows(word)
    keys_in(rows, keys)
    if options.custom_generate_function_path is None and not options.only_evaluates:
        raise UsageError(
            f"{word.path} is a folder of tasks, but no agent is given",
            f"give --custom-generate-function-path {AGENT}",
        )
    if not isinstance(rows, TaskRows):
        return
    seconds, folder = rows.longest
    if options.custom_generate_function_path == AGENT and seconds > options.custom_generate_timeout:
        raise UsageError(
            f"the commands and the verifier of {folder / CONFIG} may take {seconds:g} s together, and a call may take "
            f"{options.custom_generate_timeout:g} s",
            f"give --timeout-factor {math.ceil(seconds / 30) / 10:g}; engine time does not count",
        )
