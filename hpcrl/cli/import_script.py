"""`hpcrl import`: a run script of slime's or vime's, or its arguments, as a recipe on standard output.

Invariant: the script's text is read and its variables computed; nothing that it would start is started.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrl.config.flags import parse_flags
from hpcrl.config.rules.sampling import drafts_of_files
from hpcrl.config.slime.arguments import Translation, translate
from hpcrl.config.slime.verbatim import broken_rules, name_of, recipe_text, split_arguments, split_program, summary
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError, raise_together
from hpcrl.sandbox.slime_script import RunScript, run_script
from hpcrl.utils.plain_text import strip_control

USAGE = """\
usage: hpcrl import SCRIPT [NAME=VALUE ...] [--models-dir DIR] [--trust-script] [-- WORDS] > RECIPE.toml
       hpcrl import -- ARGUMENTS > RECIPE.toml

  SCRIPT             a bash script, or a launcher in Python (.py) that calls execute_train or starts train.py
  NAME=VALUE         environment variables that the script reads, such as BASE_DIR=/scratch/me
  --models-dir DIR   slime's scripts/models, if it is not next to the script
  --trust-script     run the script without a sandbox where none can be made: commands are still noted, not run, but
                     bash and Python can write your files
  WORDS              the command line of a launcher in Python

The script runs in a sandbox: of your files it sees its own directory and DIR, read-only; it has no network, no
terminal and no other process; commands other than text tools (ray, pkill, ssh, python ...) are noted, not run. The
arguments of train.py become the recipe. Its end reports on each flag; standard error shows changed and dropped ones.
Exit status 2: hpcrl refuses some of them."""

TRAIN_ENVIRONMENT = "--train-env-vars"
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)


def import_script(argv: list[str]) -> int:
    """The command."""
    before, arguments = split_arguments(argv)
    flags = {"models-dir": Kind("str"), "trust-script": Kind("bool")}
    overrides, own, words = parse_flags(before, flags, only=())
    if overrides:
        raise UsageError(
            f"--{next(iter(overrides)).replace('_', '-')} has no effect here", "write it into the recipe, or after --"
        )
    if arguments is not None and not words:
        program, given = split_program(arguments)
        return _write(
            translate(given, program), name_of(given), "The arguments of train.py, translated by hpcrl import.", ()
        )
    if not words:
        raise UsageError("no script given", "name it first: hpcrl import SCRIPT > RECIPE.toml")
    variables = dict(map(_variable, words[1:]))
    file = Path(words[0])
    if arguments is not None and file.suffix != ".py":
        raise UsageError(f"both a script and arguments: {file}", "give one of them; a launcher in Python may have both")
    models = Path(own["models-dir"]) if "models-dir" in own else None
    script = run_script(file, variables, models, words=arguments or (), trusted=own.get("trust-script", False))
    about = f"{file.name}, translated by hpcrl import."
    translation, notes = translated(script)
    return _write(translation, name_of_script(file), about, [*script.notes, *notes])


def translated(script: RunScript) -> tuple[Translation, list[str]]:
    """What a script hands to train.py, translated, and what is to be said of files that it writes itself.

    A setting that only a file of the script's own says is read from what it wrote; a file that the run would read is
    no longer there.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-import-") as folder:
        places = {}
        for number, (path, text) in enumerate(script.files.items()):
            places[path] = f"{folder}/{number}{Path(path).suffix}"
            Path(places[path]).write_text(text)
        words = [_placed(word, places) for word in with_environment(script)]
        found = translate(words, script.program)
    back = {place: path for path, place in places.items()}
    lines = tuple(replace(line, given=_back(line.given, back)) for line in found.lines)
    wrong = tuple(UsageError(_back(error.what, back), _back(error.hint, back)) for error in found.wrong)
    values = {name: back.get(value, value) if isinstance(value, str) else value for name, value in found.values.items()}
    kept = [path for place, path in back.items() if place in found.values.values()]
    drafts = values.get("vllm", {}).get("speculative_config", {})
    return replace(found, values=values, lines=lines, wrong=wrong), [
        *(f"{path}: the launcher writes this file itself: write it where the run finds it" for path in kept),
        *drafts_of_files(drafts, values.get("mtp_num_layers"), values.get("hf_checkpoint")),
    ]


def _placed(word: str, places: Mapping[str, str]) -> str:
    """A word, or what follows the = of a flag, with the path at which a file of the script's own is."""
    flag, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{flag}={places.get(value, value)}"
    return places.get(word, word)


def _back(text: str, places: Mapping[str, str]) -> str:
    """The text with the script's own paths in it."""
    for place, path in places.items():
        text = text.replace(place, path)
    return text


def _variable(word: str) -> tuple[str, str]:
    if not (found := _VARIABLE.fullmatch(word)):
        raise UsageError(f"{word} is not NAME=VALUE", "after the script come the variables that it reads")
    return found[1], found[2]


def with_environment(script: RunScript) -> list[str]:
    """The arguments of a script, with what its environment says beyond what hpcrl sets by itself.

    Its own --train-env-vars, of which the last counts, wins; what is no JSON there stays, to be refused.
    """
    if not script.environment:
        return list(script.arguments)
    words: list[str] = []
    own = ""
    rest = list(script.arguments)
    while rest:
        flag, equals, value = rest[0].partition("=")
        if flag.replace("_", "-") == TRAIN_ENVIRONMENT and (equals or len(rest) > 1):
            own = value if equals else rest.pop(1)
            rest.pop(0)
        else:
            words.append(rest.pop(0))
    try:
        told = json.loads(own or "{}")
        merged = {**script.environment, **told}
    except (ValueError, TypeError):
        return list(script.arguments)
    return [*words, TRAIN_ENVIRONMENT, json.dumps(merged)]


def name_of_script(file: Path) -> str:
    """A name for the run: run-qwen3-4B.sh is qwen3-4b."""
    return re.sub(r"[^a-z0-9._-]+", "-", re.sub(r"^run[-_]", "", file.stem.lower())).strip("-.") or "imported"


def _write(translation: Translation, name: str, about: str, notes: Sequence[str]) -> int:
    """Print the recipe, and say on standard error what is not simply kept.

    Raises:
        UsageError: for what cannot be honoured.
    """
    print(recipe_text(translation, name, about, notes), end="")
    for line in [*(line for line in summary(translation) if not line.startswith("refused")), *notes]:
        print(f"hpcrl: note: {strip_control(line)}", file=sys.stderr)
    raise_together([*translation.wrong, *broken_rules(translation, {})])
    return 0
