"""Commands of the documents, typed in one fresh interpreter of some environment, where each is told to start
nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.documents.scene import ARRAYS, Scene
from tests.documents.texts import Command
from tests.documents.which import dry
from tests.support.published_models import MODELS

#: of a model whose weights nobody reads
CONFIG = MODELS["Qwen3-4B"][1]


def typed(commands: Sequence[Command], scene: Scene, python: Path) -> list[tuple[int, str]]:
    """(exit status, what was printed) of each."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("one_process.py"))],
        input=json.dumps([in_python(scene.filled(command)) for command in commands]),
        env=scene.environment(python.parent),
        cwd=scene.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return [(status, said) for status, said in json.loads(done.stdout)]


def in_python(line: str) -> tuple[list[str], str]:
    """(arguments, file that takes the output or "") of a line of the shell, arrays of run scripts filled in; it starts
    nothing."""
    line, _, into = line.partition(" > ")
    words = shlex.split(line)
    for name, value in ARRAYS.items():
        words = [part for word in words for part in (shlex.split(value) if word == f"${{{name}[@]}}" else [word])]
    return dry(words)[1:], into.strip()
