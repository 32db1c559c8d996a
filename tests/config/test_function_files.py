"""A file where the dotted path of a function is taken: what it is read as, what is refused, and what a run copies and
imports of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.module_search import with_function_files
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, missing_functions
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.job import begin_job, reopen_job
from hpcrl.launch.user_code.snapshot import begin_code, resume_code
from hpcrl.run.code_files import CODE
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import LIVE
from tests.support.options import GRPO

REPO = Path(__file__).parents[2]
#: as a role imports it, and then a process that the role starts
LOOK = """\
import subprocess, sys
from pathlib import Path
if len(sys.argv) > 2:
    from hpcrl.run.code_files import use_code
    use_code(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(subprocess.run([sys.executable, __file__, sys.argv[1]]).returncode)
from hpcrl.run.code_files import use_inherited_code
use_inherited_code()
from hpcrl.config.custom_functions import load_object
print(load_object("mine.where", "--x"), load_object("helper.where", "--x"))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a reward, elsewhere than where the run is started."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    folder = tmp_path / "own"
    (folder / "pack" / "sub").mkdir(parents=True)
    (folder / "mine.py").write_text("import helper\nwhere = __file__\n\n\ndef brief(options, sample):\n    return 1\n")
    (folder / "helper.py").write_text("where = __file__\n")
    for name in ("pack/__init__.py", "pack/sub/__init__.py", "pack/sub/deep.py"):
        (folder / name).touch()
    return folder


def resolved(own: Path, **values: Any) -> Options:
    recipe = own / "recipe.toml"
    rest = {key: value for key, value in GRPO.items() if key != "rm_type"} | values
    recipe.write_text("".join(f"{key} = {value!r}\n" for key, value in rest.items()))
    return resolve_stages(load_recipe(recipe), {}, {"run": "r", "prepared": "p"})[0]


def test_a_file_is_its_module(own: Path) -> None:
    """Relative to where the run is started, next to the recipe, with a weight, in a package; other values stay."""
    near = resolved(own, custom_rm_path="../own/mine.py:brief", code_path=["lib"])
    assert (near.custom_rm_path, near.code_path) == ("mine.brief", [str(own), str(own.parent / "home" / "lib")])
    words = resolved(own, rm_type=["exact:0.5", "{recipe}/mine.py:brief:0.1"])
    assert (words.rm_type, words.code_path) == (["exact:0.5", "mine.brief:0.1"], [str(own)])
    deep = with_function_files({"custom_rm_path": f"{own}/pack/sub/deep.py:f", "prompt_data": "a.py:b"}, POINTS)
    assert deep == {"custom_rm_path": "pack.sub.deep.f", "prompt_data": "a.py:b", "code_path": [str(own)]}
    assert with_function_files({"custom_rm_path": "mine.brief"}, POINTS) == {"custom_rm_path": "mine.brief"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("mine.py", "--custom-rm-path mine.py names a file.*mine.py:FUNCTION"),
        ("my-own.py:f", "my-own.py cannot.*rename"),
        ("json.py:f", "json is .* Python's own"),
        ("hpcrl.py:f", "hpcrl is .* hpcrl's own"),
    ],
)
def test_a_file_that_is_no_module(path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_function_files({"custom_rm_path": path}, POINTS)


def test_two_files_of_one_name(own: Path) -> None:
    with pytest.raises(UsageError, match="another mine is in .*own; rename"):
        with_function_files({"custom_rm_path": f"{own}/mine.py:f", "rollout_sample_hook_path": ["mine.py:f"]}, POINTS)


def test_a_file_or_function_that_is_absent(own: Path) -> None:
    """Asked where all functions are looked for, with the file's directory among those that are named."""
    assert missing_functions(resolved(own, custom_rm_path="{recipe}/mine.py:brief")) == []
    (lacks,) = missing_functions(resolved(own, custom_rm_path="{recipe}/mine.py:breif"))
    assert "mine has no breif" in str(lacks) and f"{own}/mine.py defines brief" in str(lacks)
    (gone,) = missing_functions(resolved(own, custom_rm_path="{recipe}/gone.py:f"))
    assert "no module gone" in str(gone) and f"looked for in {own}, " in str(gone)


def test_a_directory_without_functions(own: Path) -> None:
    with pytest.raises(UsageError, match="--code-path has no effect"):
        resolved(own, rm_type="exact", code_path=["lib"])


@pytest.mark.parametrize("live", [False, True])
def test_a_run_imports_the_file(own: Path, tmp_path: Path, live: bool) -> None:
    """A run copies the file and what it imports from its directory; its processes, and those that they start, import
    the copies, or with --live-code the originals, wherever they are started."""
    root = tmp_path / "run"
    root.mkdir()
    options = resolved(own, custom_rm_path="{recipe}/mine.py:brief")
    begin_code(root, [options], [], own)
    assert {path.name for path in (root / CODE / "own").iterdir()} == {"mine.py", "helper.py", "pack", "recipe.toml"}
    if live:
        (root / LIVE).touch()
    (tmp_path / "look.py").write_text(LOOK)
    command = [sys.executable, str(tmp_path / "look.py"), str(root), *options.code_path]
    place = {**os.environ, "PYTHONPATH": str(REPO)}
    said = subprocess.run(command, env=place, capture_output=True, text=True, check=True, timeout=240).stdout.split()
    there = own if live else root / CODE / "own"
    assert said == [str(there / "mine.py"), str(there / "helper.py")]


def test_a_resumed_run_means_the_same_file(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that has not begun is resolved again at a resume: from another directory, with another file at the same
    relative path, and with the package's directory changed or away, it is the function that was submitted, imported
    from its copy.  What has changed, or cannot be read, is said."""
    (own / "pack" / "sub" / "deep.py").write_text("where = __file__\ndef f(options, sample):\n    return 1\n")
    monkeypatch.chdir(own)
    (own / "recipe.toml").write_text(
        "".join(f"{key} = {value!r}\n" for key, value in GRPO.items() if key != "rm_type")
        + '[[stage]]\nname = "first"\n[[stage]]\nname = "last"\nrm_type = "{recipe}/pack/sub/deep.py:f"\n'
    )
    flags = {"first.custom_rm_path": "./pack/sub/deep.py:f", "run_dir": str(tmp_path / "run")}
    job = begin_job(load_recipe("recipe.toml"), flags, here=False)
    decoy = tmp_path / "elsewhere"
    (decoy / "pack" / "sub").mkdir(parents=True)
    (decoy / "pack" / "sub" / "deep.py").write_text("def f(): ...\n")
    monkeypatch.chdir(decoy)
    capsys.readouterr()

    def resumed() -> str:
        """What a resume says."""
        stages = reopen_job(job.root).stages
        assert [stage.code_path for stage in stages] == [[str(own)], [str(own)]]
        assert (stages[0].custom_rm_path, stages[1].rm_type) == ("pack.sub.deep.f",) * 2
        resume_code(job.root, None)
        return capsys.readouterr().err

    assert resumed() == ""
    (own / "pack" / "__init__.py").unlink()
    (own / "pack" / "sub" / "deep.py").write_text("other = 1\n")
    said = resumed()
    assert f"{own}/pack/sub/deep.py changed" in said and f"{own}/pack/__init__.py cannot be read" in said
    (own / "pack").rename(own / "away")
    said = resumed()
    assert "changed" not in said and f"{own}/pack/sub/deep.py" in said and f"{job.root / CODE}" in said
    code = f"from pathlib import Path; from hpcrl.run.code_files import use_code; use_code(Path({str(job.root)!r}), " \
        f"[{str(own)!r}]); from pack.sub.deep import where; print(where)"  # fmt: skip
    place = {**os.environ, "PYTHONPATH": str(REPO)}
    there = subprocess.run(
        [sys.executable, "-c", code], env=place, capture_output=True, text=True, check=True, timeout=240
    )
    assert there.stdout.strip() == str(job.root / CODE / "own" / "pack" / "sub" / "deep.py")


def test_two_stages_with_files_of_one_name(tmp_path: Path) -> None:
    """A run has one copy of a module: one stage would be trained on the other's reward."""
    stages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("def f(): ...\n")
        stages.append(Options(custom_rm_path="reward.f", code_path=[str(tmp_path / name)]))
    root = RunDir.create(tmp_path / "run").root
    with pytest.raises(UsageError, match="reward is in .*/a and in .*/b"):
        begin_code(root, stages, [], tmp_path)


def test_a_job_does_not_wait_for_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they are may hang on a compute node; and what is wrong with the record of them is said, and ends nothing."""
    from hpcrl.launch.user_code import snapshot

    ended = threading.Event()
    monkeypatch.setattr(snapshot, "ORIGINALS", 0.05)
    monkeypatch.setattr(snapshot, "changed_files", lambda *_, **__: (ended.wait(60), ([], []))[1])
    snapshot.tell_changed_code(tmp_path)
    assert not ended.is_set() and capsys.readouterr().err == ""
    ended.set()

    def damaged(*_: object, **__: object) -> None:
        raise HpcrlError("code.json is damaged")

    monkeypatch.setattr(snapshot, "ORIGINALS", 60.0)
    monkeypatch.setattr(snapshot, "changed_files", damaged)
    snapshot.tell_changed_code(tmp_path)
    assert "note: code.json is damaged" in capsys.readouterr().err
