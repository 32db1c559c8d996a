"""An srun whose output comes as from a busy network: pieces of at most 1024 bytes, now of one task, now of another,
lines torn.

    python -m tests.support.torn_srun DIRECTORY        puts an `srun` there, to stand before the real one in PATH

Slurm sends what tasks write in such pieces and puts no lines together again.  On a network of one machine each piece
happens to be a whole line, so here they are cut: the real srun labels its lines by task (and ends a line wherever it
has cut one), and a process that reads them gives them out in turns. Exit status, standard error and signals are the
real srun's, which this process becomes.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
from pathlib import Path

PIECE = 1024
LABEL = re.compile(rb" *(\d+): ?")
TURN = 0.2  #: seconds that a torn line waits for its rest
TORN = 7  #: bytes at the end of what a task has written that wait for another turn


def install(directory: Path) -> Path:
    """Write the `srun` into `directory`, which must come first in PATH; returns the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "srun").write_text(
        f'#!/bin/bash\nPYTHONPATH={Path(__file__).parents[2]} exec {sys.executable} -m {__name__} "$@"\n'
    )
    (directory / "srun").chmod(0o755)
    return directory


def real(path: str) -> str:
    """The srun that is none of ours."""
    places = [place for place in path.split(":") if "-m tests." not in _head(Path(place) / "srun")]
    found = shutil.which("srun", path=":".join(places))
    assert found, path
    return found


def _head(file: Path) -> str:
    try:
        return file.read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""


def tear(source: int, out: int) -> None:
    """Everything from `source`, labelled lines, to `out`, in torn pieces; returns at its end."""
    waiting: dict[bytes, bytes] = {}
    rest, over = b"", False
    while not over:
        if select.select([source], [], [], TURN)[0]:
            data = os.read(source, 1 << 16)
            over = not data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines + ([rest] if over and rest else []):
                label = LABEL.match(line)
                task, text = (label[1], line[label.end() :]) if label else (b"", line)
                waiting[task] = waiting.get(task, b"") + text + b"\n"
        held = 0 if over else TORN
        while any(len(text) > held for text in waiting.values()):
            for task, text in waiting.items():
                cut = min(PIECE, max(len(text) - held, 0))
                os.write(out, text[:cut])
                waiting[task] = text[cut:]


def main() -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        tear(reader, 1)
        os._exit(0)
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)
    command = real(os.environ["PATH"])
    os.execv(command, [command, "--label", *sys.argv[1:]])


if __name__ == "__main__":
    main()
