"""Documented commands as a user types them: through the installed `hpcrl`, each in a process of its own, with a shell's
environment.

Of lines that differ in names and values alone, the first is typed here; tests/documents/test_wheel.py types all of
them in one interpreter, with what a login node has.

What starts a run is told to start nothing (tests/soak/test_documented_runs.py runs them); what is asked of a run is
asked of the quick start's, which runs whole, once for all tests (`quick_start`).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.documents.scene import Scene, make_scene
from tests.documents.texts import printed
from tests.documents.which import cheap, conversion, dry, helped, of_a_run
from tests.support.quick_start import QuickStart

PROGRAMS = Path(sys.executable).parent
#: what cannot be asked of a run that is finished says so
NOT_OF_A_FINISHED_RUN = {
    "stop": (1, "it is finished"),
    "cancel": (1, "it is finished"),
    "resume": (2, "is finished; train on with"),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), task / "model")


def shell(scene: Scene, line: str, seconds: float = 120) -> tuple[int, str]:
    """(exit status, what was printed) of a line in a shell of the scene."""
    command = ["bash", "-c", f"source arrays.sh; {line}"]
    done = subprocess.run(
        command, env=scene.environment(PROGRAMS), cwd=scene.folder, capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stdout + done.stderr


def told(line: str) -> str:
    """A line that starts something, told to start nothing; all else of it stays as it is printed."""
    if dry(shlex.split(line)) == shlex.split(line):
        return line
    before, dashes, after = line.partition(" -- ")
    return f"{before} --dry-run{dashes}{after}"


def shape(line: str) -> tuple[str, ...]:
    """What of a line does not vary with names and values: its verb, its flags, what the shell does."""
    words = shlex.split(line)
    kinds = {word.rpartition(".")[2] for word in words[1:] if word.endswith((".toml", ".sh", ".py"))}
    flags = [word.partition("=")[0] for word in words if word.startswith("-") or word == ">"]
    return (words[1], *sorted(kinds), *flags)


def test_lines_of_one_shape() -> None:
    assert shape("hpcrl run a.toml --lr 1") == shape("hpcrl run b.toml --lr 2") != shape("hpcrl run a.toml --no-lr")
    assert shape("hpcrl import a.sh > b.toml") != shape("hpcrl import a.py > b.toml") != shape("hpcrl import a.py")


@pytest.mark.process
def test_each_in_a_process_of_its_own(scene: Scene) -> None:
    typed = [told(scene.filled(command)) for command in [*printed(), *helped()] if cheap(command)]
    commands = list({shape(line): line for line in reversed(typed)}.values())
    assert len(commands) > 50
    lines = sorted(
        commands, key=lambda line: " > " not in line
    )  # what writes a file that another line reads comes first
    redirected = [line for line in lines if " > " in line]
    answers = {line: shell(scene, line) for line in redirected}
    rest = lines[len(redirected) :]
    with ThreadPoolExecutor(2) as pool:
        answers |= dict(zip(rest, pool.map(lambda line: shell(scene, line), rest), strict=True))
    check(answers)
    assert not list((scene.folder / "runs").glob("rewarded-*")), "nothing was started"


def check(answers: dict[str, tuple[int, str]]) -> None:
    """Every line ended well."""
    wrong = [f"{line}\n  status {status}: {said[-1000:]}" for line, (status, said) in answers.items() if status]
    assert not wrong, "\n".join(wrong)


@pytest.mark.process
def test_conversions(scene: Scene) -> None:
    """In the page's order: the second begins with what the first has made."""
    shutil.rmtree(scene.folder / "MODEL-FP8")
    lines = [scene.filled(command) for command in printed() if conversion(command)]
    assert len(lines) >= 3
    check({line: shell(scene, line, 300) for line in lines})
    assert (scene.folder / "OUT" / "config.json").is_file()


@pytest.mark.vllm
def test_what_is_asked_of_a_run(quick_start: QuickStart, scene: Scene) -> None:
    run = scene.folder / "runs" / "one"
    shutil.copytree(quick_start.root, run)
    shutil.copytree(run, scene.folder / "runs" / "other")
    asked = {command.line: command for command in [*printed(), *helped()] if of_a_run(command)}.values()
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda command: shell(scene, scene.filled(command, "runs/one")), asked)
        for command, (status, said) in zip(asked, answers, strict=True):
            expected, words = NOT_OF_A_FINISHED_RUN.get(command.verb, (0, ""))
            assert status == expected and words in said, f"{command.place}: {command.line}: {status}: {said[-2000:]}"
            assert said.strip() and not raised(said), f"{command.line}: {said}"


def raised(said: str) -> bool:
    """Whether the command itself printed a traceback; one that it shows of a process's log stands behind the process's
    name."""
    return any(line.startswith("Traceback") for line in said.splitlines())
