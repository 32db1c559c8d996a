"""A look at what a run begins with before anything of it is made: are model and prompt files here, and the first rows of each file.

Invariant: what is refused here the roles would refuse too; what cannot be known here (a file that is yet to be made, or that other
machines alone can see, the length of a prompt in tokens) is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import missing_functions
from hpcrl.config.prompts.eval_sets import eval_sets
from hpcrl.config.prompts.prompt_words import PromptWord, read_words
from hpcrl.config.recipe import Recipe
from hpcrl.errors import DataError, HpcrlError, UsageError, raise_together
from hpcrl.findings import Finding
from hpcrl.prompt_files.row_checks import Keys, read_row
from hpcrl.prompt_files.rows import first_rows

FIRST = 100  #: rows of each file that are looked at


def look_at(stages: Sequence[Options]) -> None:
    """UsageError or DataError for the first thing that is wrong with the held-out sets or the prompt files of these stages."""
    for options in stages:
        for word, keys in _files(options):
            _look(word, keys)


def refuse_absent(stages: Sequence[Options], made: Callable[[str], bool], same_code: bool = True) -> None:
    """UsageError for every file and directory that a stage begins with, and every own function, that is not here.

    made: whether a path need not be here yet: the run makes it, or the nodes alone have it.  same_code: whether modules are found
    in the run as they are here.
    """
    wrong, functions = [], []
    for options in stages:
        functions += missing_functions(options) if same_code else []
        wanted = [("--hf-checkpoint", options.hf_checkpoint), ("--eval-config", options.eval_config)]
        wanted += [("the prompt file", word.path) for word, _ in _files(options)]
        wrong += [f"{what} {path} is not here" for what, path in wanted if path and not made(path) and not Path(path).exists()]
    errors = [UsageError(text, "name what is there") for text in dict.fromkeys(wrong)]
    raise_together([*errors, *{str(error): error for error in functions}.values()])


def made_by_run(recipe: Recipe, run: str, path: str) -> bool:
    """Whether the run itself makes a file that it begins with: in its directory `run`, or by a prepare command that names it."""
    return path.startswith(run) or any(path in word for command in recipe.prepare for word in command)


def findings(stages: Sequence[Options], made_in: Path) -> Iterator[Finding]:
    """The same as findings; a file that is not here is one too, unless the run itself makes it, in the directory `made_in`."""
    for options in stages:
        try:
            if options.eval_config is not None and not Path(options.eval_config).is_file():
                yield _absent(Path(options.eval_config), made_in)
            for word, keys in _files(options):
                path = Path(word.path)
                if not path.is_file():
                    yield _absent(path, made_in)
                    continue
                _look(word, keys)
                yield Finding("ok", "", f"prompts in {path}: its first rows have what they must")
        except HpcrlError as error:
            yield Finding("fail", "", error.what, error.hint)


def _absent(path: Path, made_in: Path) -> Finding:
    if path.is_relative_to(made_in):
        return Finding("ok", "", f"{path} is made by the run itself")
    return Finding("warn", "", f"{path} is not here", "the machine of the rollout process must have it")


def _files(options: Options) -> Iterator[tuple[PromptWord, Keys]]:
    """Every prompt file of a stage, and where its rows have what."""
    if not options.only_evaluates and options.load_debug_rollout_data is None and options.data_source_path is None:
        keys = Keys.of(options)
        yield from ((word, keys) for word in read_words(options.prompt_data, "--prompt-data"))
    if (
        options.eval_interval is not None
        and not options.trains_only
        and (options.eval_config is None or Path(options.eval_config).is_file())
    ):
        yield from ((held.word, Keys.of_set(held)) for held in eval_sets(options))


def _look(word: PromptWord, keys: Keys) -> None:
    path = Path(word.path)
    if not path.is_file() or not word.whole:  # the first rows need not be of the slice
        return
    if path.suffix == ".jsonl":
        rows = first_rows(path, FIRST)
    elif path.suffix == ".parquet":
        from hpcrl.prompt_files.parquet_rows import first_parquet_rows

        rows = first_parquet_rows(path, FIRST)
    else:
        raise DataError(f"{path} is no .jsonl or .parquet file", "a prompt file has one JSON object a line and ends in .jsonl")
    found = False
    for where, row in rows:
        read_row(where, row, keys)
        found = True
    if not found and path.suffix == ".jsonl":
        raise DataError(f"{path} holds no prompts", "one JSON object a line is wanted")
