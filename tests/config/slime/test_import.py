"""A whole script: read where it can do no harm, and the recipe that comes out."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.slime.verbatim import PLACES, recipe_and_refusals
from hpcrl.errors import UsageError
from hpcrl.sandbox.kinds import SETTINGS
from hpcrl.sandbox.slime_script import run_script
from tests.config.slime.guides import GUIDES, MODELS, SCRIPT
from tests.support.able import needs

END = "python3 train.py --hf-checkpoint /m --num-rollout 1\n"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


@pytest.mark.parametrize(
    "guide", ["GLM4-9B, 4 + 4", "Qwen3-4B, colocated", "Qwen3-30B-A3B", "GLM-4.5-355B, BF16 rollouts"]
)
@pytest.mark.parametrize("model_file", [True, False])
@needs("namespaces")
def test_script_and_arguments_agree(
    guide: str, model_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script and its arguments give the same options."""
    words = GUIDES[guide][0]
    model = next(
        name
        for name, flags in MODELS.items()
        if shlex.split(flags)[:6] == words[words.index(shlex.split(flags)[0]) :][:6]
    )
    flags = shlex.split(MODELS[model])
    start = words.index(flags[0])
    others = [*words[:start], *words[start + len(flags) :]]
    if model_file:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / f"{model}.sh").write_text(f"MODEL_ARGS=({shlex.join(flags)})\n")
    file = tmp_path / f"run-{model}.sh"
    file.write_text(SCRIPT.format(model=model, words=shlex.join(others)))
    status = main(["import", str(file)])
    said = capsys.readouterr()
    assert status == 0, said.err
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(said.out)
    verbatim, _ = recipe_and_refusals([*(flags if model_file else []), *others], {})
    assert resolve_stages(load_recipe(recipe), {"name": "x"}, PLACES) == resolve_stages(verbatim, {"name": "x"}, PLACES)
    assert load_recipe(recipe).name == model.lower()
    for line in ("ray start --head", "pkill -9 sglang", "sleep 3", "environment PYTHONPATH"):
        assert f"#   {line}" in said.out
    assert ("and none needed" in said.err) is not model_file


@needs("namespaces")
def test_the_script_can_do_no_harm(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("here")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = f"""
builtin trap - DEBUG; unset -f kill  # only the kernel is left
{sys.executable} -c 'open("{outside}/python", "w")'
/bin/touch {outside}/touched
echo x > {outside}/redirected
echo x > {victim}
/bin/rm {victim}
echo x > $TMPDIR/mine && MINE=yes
exec 9<>/dev/tcp/127.0.0.1/{port} && NET=yes && echo from-the-script >&9
kill -9 {os.getpid()} && KILLED=yes
/bin/mount -o remount,rw / && MOUNTED=yes
unshare -Urm true && AGAIN=yes
python3 train.py --mine "$MINE" --net "$NET" --killed "$KILLED" --mounted "$MOUNTED" --again "$AGAIN" --home "$SECRET_TOKEN"
"""
        os.environ["SECRET_TOKEN"] = "told"
        try:
            found = run_script(script(tmp_path / "run-evil.sh", text), {})
        finally:
            del os.environ["SECRET_TOKEN"]
        listener.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while True:  # another test of this machine may connect to all that listens
                caller, _ = listener.accept()
                caller.settimeout(0.1)
                with caller, contextlib.suppress(OSError):
                    assert b"from-the-script" not in caller.recv(64)
    assert os.listdir(outside) == ["victim"] and victim.read_text() == "here"
    said = dict(zip(found.arguments[::2], found.arguments[1::2], strict=True))
    assert said["--mine"] == "yes"
    assert {said[name] for name in ("--net", "--killed", "--mounted", "--home")} == {""}


@pytest.mark.process
@pytest.mark.parametrize("form", ['"$0" -m hpcrl import <(cat "$1")', 'cat "$1" | "$0" -m hpcrl import /dev/stdin'])
def test_a_script_that_is_in_no_file(form: str, tmp_path: Path) -> None:
    """A script may come out of a pipe, by its shell's name for it or as standard input."""
    file = script(tmp_path / "run-x.sh", END)
    words = ["/bin/bash", "-c", form, sys.executable, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert 'hf_checkpoint = "/m"' in done.stdout, done.stderr


@needs("namespaces")
def test_a_script_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="had not ended after 1 s"):
        run_script(script(tmp_path / "run-x.sh", "while :; do :; done & while :; do :; done"), {}, seconds=1.0)


@needs("namespaces")
def test_variables_of_a_script(tmp_path: Path) -> None:
    """Variables come from the command line, and missing ones are reported."""
    file = script(tmp_path / "run-x.sh", "A=${B:-c}\npython3 train.py --hf-checkpoint $BASE/$A --ref-load ${ROOT}/x")
    found = run_script(file, {"BASE": "/scratch/me", "B": "d e"})
    assert found.arguments[1] == "/scratch/me/d" and "nothing sets ROOT" in found.notes[-1]


@needs("namespaces")
def test_which_command_starts_the_training(tmp_path: Path) -> None:
    job = """ray job submit --runtime-env-json='{"env_vars": {"NVTE_FLAG": "1", "MASTER_ADDR": "x"}}' -- python3 train_async.py --lr 1"""
    found = run_script(script(tmp_path / "run-x.sh", job), {})
    assert (found.program, found.arguments, found.environment) == ("train_async.py", ("--lr", "1"), {"NVTE_FLAG": "1"})
    found = run_script(script(tmp_path / "run-x.sh", job.replace(', "MASTER', ' "MASTER')), {})
    assert not found.environment and "--runtime-env-json is no JSON" in found.notes[0]
    found = run_script(script(tmp_path / "run-y.sh", f"{END}{END}"), {})
    assert "it starts training 2 times" in found.notes[-1]
    with pytest.raises(UsageError, match="starts neither train.py nor train_async.py; it ended with status 3"):
        run_script(script(tmp_path / "run-z.sh", "exit 3"), {})
    with pytest.raises(UsageError, match="cannot read the script"):
        run_script(tmp_path / "none.sh", {})


@needs("namespaces")
def test_a_directory_of_models_may_be_named(tmp_path: Path) -> None:
    models = tmp_path / "there"
    models.mkdir()
    (models / "own.sh").write_text("MODEL_ARGS=(--num-layers 3)\n")
    file = script(
        tmp_path / "run-x.sh", f'. "/nowhere/models/own.sh"\npython3 train.py "${{MODEL_ARGS[@]}}" {END[17:]}'
    )
    assert run_script(file, {}, models).arguments[:2] == ("--num-layers", "3")
    assert "no such file; --models-dir" in " ".join(run_script(file, {}).notes)


@pytest.mark.parametrize("said", ['"$(dirname "$0")/../common.sh"', "../common.sh", "$HOME/common.sh"])
@needs("namespaces")
def test_a_file_hidden_from_a_script(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there but not shown is an error, as its settings would be missed; a missing one is a note."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own").mkdir()
    file = script(tmp_path / "own" / "run-x.sh", f"source {said}\n{END}")
    assert "no such file" in " ".join(run_script(file, {}).notes)
    (tmp_path / "common.sh").write_text("A=1\n")
    with pytest.raises(UsageError, match="common.sh, which the sandbox hides.*move it"):
        run_script(file, {})
    with pytest.raises(UsageError, match="sandbox hides"):  # a home directory is not shown
        run_script(script(tmp_path / "run-y.sh", f". ./common.sh\n{END}"), {})


@needs("namespaces")
def test_model_arguments_hidden_from_a_script(tmp_path: Path) -> None:
    """They are a note, which says how they are shown."""
    (tmp_path / "models").mkdir()
    (tmp_path / "own").mkdir()
    for name in ("mine", "qwen3-4B"):
        (tmp_path / "models" / f"{name}.sh").write_text("MODEL_ARGS=(--num-layers 3)\n")
    text = f'. ../models/mine.sh\npython3 train.py "${{MODEL_ARGS[@]}}" {END[17:]}'
    file = script(tmp_path / "own" / "run-x.sh", text)
    [note] = [note for note in run_script(file, {}).notes if "mine.sh" in note]
    assert "hidden from the script" in note and f"--models-dir {tmp_path}/models" in note
    assert run_script(file, {}, tmp_path / "models").arguments[:2] == ("--num-layers", "3")
    file = script(tmp_path / "own" / "run-y.sh", f". ../models/qwen3-4B.sh\n{END}")
    [note] = [note for note in run_script(file, {}).notes if "qwen3-4B.sh" in note]
    assert "hidden from the script" in note and "none needed" in note


@needs("namespaces")
def test_settings_of_the_machine_are_not_read(tmp_path: Path) -> None:
    """What lies in /etc and is hidden sets an environment: a note."""
    file = next(path for path in Path("/etc").iterdir() if path.is_file() and path.name not in SETTINGS)
    [note, *_] = run_script(script(tmp_path / "run-x.sh", f"source {file}\n{END}"), {}).notes
    assert str(file) in note and "environment" in note


@needs("namespaces")
def test_a_model_without_a_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(
        tmp_path / "run-x.sh", f"source models/glm5-744B-A40B.sh\npython3 train.py ${{MODEL_ARGS[@]}} {END[17:]}"
    )
    assert main(["import", str(file)]) == 2
    assert "no model family of" in capsys.readouterr().err


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(tmp_path / "run-x.sh", END)
    for words in ([], [str(file), "BASE"], [str(file), "--lr", "1"], [str(file), "--", "--lr", "1"]):
        assert main(["import", *words]) == 2
    assert main(["import", "--help"]) == 0 and "NAME=VALUE" in capsys.readouterr().out
    assert main(["import", "--", *GUIDES["Qwen3-4B, 2 + 6"][0]]) == 0
    assert 'hf_checkpoint = "/scratch/Qwen3-4B"' in capsys.readouterr().out
