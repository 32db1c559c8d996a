"""RUN/code: which files of the user's a run copies, what it says of the rest, and what a resumed run imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.job import begin_job
from hpcrl.launch.user_code import directories, snapshot
from hpcrl.launch.user_code.snapshot import begin_code, function_paths, note_changed_scripts, resume_code
from hpcrl.run.code_files import CODE, PATH, RECORD, code_folders, read_code_record
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import LIVE
from tests.launch.user_code.test_commit import git
from tests.support.able import needs

REPO = Path(__file__).parents[3]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def begin(root: Path, path: str, pythonpath: str | None = None, recipe: Path | None = None, **more: Any) -> set[str]:
    """Begin a run with the function `path`; what is in RUN/code then."""
    begin_code(root, [Options(custom_rm_path=path, **more)], [], recipe or root.parent / "recipes", pythonpath)
    return copied(root)


def copied(root: Path) -> set[str]:
    """The files in RUN/code, and that they are those that are recorded."""
    code = root / CODE
    found = {str(path.relative_to(code)) for path in code.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert {file.place for file in read_code_record(root).files if file.place} == found - {PATH}
    return found - {PATH}


def test_a_directory_is_copied_whole(home: Path, root: Path) -> None:
    """With data files and modules that nothing imports; no caches, environments, runs or what has a dot."""
    write(
        home,
        {
            "pack/__init__.py": "",
            "pack/mine.py": "import helper\n",
            "helper.py": "x = 1\n",
            "rules/a.txt": "x",
            "pack/__pycache__/mine.pyc": "x",
            "mine.pyc": "x",
            ".git/config": "x",
            "env/pyvenv.cfg": "x",
            "env/lib.py": "x",
            "runs/a/recipe.json": "x",
            "runs/a/recipe.toml": "x",
            "runs/a/big.txt": "x",
            "cards/recipe.json": "x",
        },
    )
    names = ("pack/__init__.py", "pack/mine.py", "helper.py", "rules/a.txt", "cards/recipe.json")
    assert begin(root, "pack.mine.f") == {f"home/{name}" for name in names}
    assert (root / CODE / "home" / "helper.py").read_text() == "x = 1\n"
    assert {file.source for file in read_code_record(root).files} == {str(home / name) for name in names}
    assert (root / CODE / "home" / "pack").stat().st_mode & 0o777 == 0o700


def test_a_run_within_the_directory(home: Path, tmp_path: Path) -> None:
    """It does not copy itself, by whatever path it is named."""
    write(home, {"mine.py": ""})
    (tmp_path / "linked").symlink_to(home)
    root = RunDir.create(tmp_path / "linked" / "runs" / "new").root
    (root / "recipe.toml").touch()
    assert begin(root, "mine.f") == {"home/mine.py"}


def test_directories_without_functions(home: Path, root: Path, tmp_path: Path) -> None:
    """Those of --code-path are copied, others not; one of two with the same name gets a number."""
    write(tmp_path / "a" / "lib", {"mine.py": ""})
    write(tmp_path / "b" / "lib", {"helper.py": ""})
    write(home, {"unrelated.py": ""})
    folders = [str(tmp_path / name / "lib") for name in ("a", "b")]
    assert begin(root, "mine.f", code_path=folders) == {"lib/mine.py", "lib-2/helper.py"}
    assert code_folders(root) == [f"{root / CODE}/lib", f"{root / CODE}/lib-2"]


@needs("git")
def test_files_that_git_lists(home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracked and new ones, also of a repository within; not those that it ignores or that are deleted.  No program
    that the repository names is started."""
    write(home, {"mine.py": "", "data.bin": "x", "gone.py": "", ".gitignore": "*.bin\nignored/\n"})
    write(home, {"ignored/late.py": "", "inner/deep.py": "", "inner/pack/__init__.py": "", "runs/a/recipe.json": ""})
    write(home, {"runs/a/recipe.toml": "", "runs/a/x.py": ""})
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    hook.chmod(0o700)
    git(home, "init", "--quiet")
    git(home, "add", "mine.py", "gone.py")
    git(home / "inner", "init", "--quiet")
    git(home, "config", "core.fsmonitor", str(hook))
    (home / "gone.py").unlink()
    write(home, {"new.py": ""})
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    names = (".gitignore", "mine.py", "new.py", "inner/deep.py", "inner/pack/__init__.py")
    assert begin(root, "mine.f") == {f"home/{name}" for name in names}
    assert not (tmp_path / "started").exists()
    other = RunDir.create(tmp_path / "other").root
    assert begin(other, "late.f", code_path=[str(home / "ignored")]) == {"ignored/late.py"}


@needs("git")
def test_a_function_that_git_ignores(home: Path, root: Path) -> None:
    """A package of which the copy holds only a part hides the whole one."""
    write(home, {"pack/__init__.py": "", "pack/mine.py": "", ".gitignore": "mine.py\n"})
    git(home, "init", "--quiet")
    with pytest.raises(UsageError, match=r"copy of pack lacks pack\.mine, .*--live-code"):
        begin(root, "pack.mine.f")


def test_within_the_directory_of_the_recipe(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is copied then, with what the functions find by `__file__`, unless it is too large."""
    work = tmp_path / "project"
    write(work, {"lib/mine.py": "", "rules/a.txt": "", "r.toml": ""})
    folder = str(work / "lib")
    assert begin(root, "mine.f", None, work, code_path=[folder]) == {
        "project/lib/mine.py",
        "project/rules/a.txt",
        "project/r.toml",
    }
    assert code_folders(root) == [f"{root / CODE}/project/lib"]
    monkeypatch.setattr(directories, "MOST_FILES", 2)
    other = RunDir.create(tmp_path / "other").root
    assert begin(other, "mine.f", None, work, code_path=[folder]) == {"lib/mine.py"}


@pytest.mark.parametrize(("limit", "value"), [("MOST_FILES", 1), ("MOST_BYTES", 50)])
def test_a_directory_that_is_too_large(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """It is refused, and the remedy works."""
    write(home, {"mine.py": "", "a.txt": "x" * 60, "lib/mine.py": ""})
    monkeypatch.setattr(directories, limit, value)
    with pytest.raises(UsageError, match="home has more than .*--code-path.*--live-code"):
        begin(root, "mine.f")
    assert not copied(root)
    assert begin(root, "mine.f", code_path=[str(home / "lib")]) == {"lib/mine.py"}


def test_a_home_directory_is_not_copied(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is one above it, and that is said; a directory in it is copied."""
    write(home, {"mine.py": "", "lib/theirs.py": "", "r.toml": ""})
    monkeypatch.setenv("HOME", str(home))
    assert begin(root, "mine.f") == set()
    said = capsys.readouterr().err
    assert f"mine is imported from {home}/mine.py" in said and f"{home} is a home directory" in said
    monkeypatch.setenv("HOME", str(home / "lib"))
    assert begin(root, "mine.f") == set()
    monkeypatch.setenv("HOME", str(home))
    assert begin(root, "theirs.f", None, home, code_path=[str(home / "lib")]) == {"lib/theirs.py"}


def test_folders_without_init(home: Path, root: Path) -> None:
    write(home, {"src/rewards/mine.py": ""})
    assert begin(root, "src.rewards.mine.brief") == {"home/src/rewards/mine.py"}


def test_a_module_named_like_one_of_python(home: Path, root: Path) -> None:
    write(home, {"code/__init__.py": "", "code/r.py": ""})
    assert begin(root, "code.r.f") == {"home/code/__init__.py", "home/code/r.py"}


def test_directories_of_pythonpath(home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that has the function counts; one where packages are installed does not, and the machines' own
    PYTHONPATH takes the place of ours."""
    for name in ("one", "two", "installed"):
        write(tmp_path / name, {"theirs.py": ""})
    (tmp_path / "installed" / "x.dist-info").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    assert begin(root, "theirs.f") == {"one/theirs.py"}
    for run, path, found in (("b", "two", {"two/theirs.py"}), ("c", "installed", set())):
        assert begin(RunDir.create(tmp_path / run).root, "theirs.f", str(tmp_path / path)) == found


def test_installed_packages_are_not_copied(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of site-packages, also of an environment below the directory; an editable install is named in a note, and
    so is what is not here."""
    site, editable = home / ".venv" / "lib" / "site-packages", tmp_path / "project"
    write(site, {"plugin/__init__.py": ""})
    write(editable, {"develop/__init__.py": ""})
    for entry in (site, editable):
        monkeypatch.syspath_prepend(str(entry))
    assert begin(root, "plugin.f") == begin(root, "numpy.f") == begin(root, "json.dumps") == set()
    assert not capsys.readouterr().err
    assert begin(root, "develop.f") == set() and f"{editable}/develop" in capsys.readouterr().err
    assert begin(root, "nowhere_to_be_found.f") == set() and "nowhere_to_be_found" in capsys.readouterr().err
    assert not (root / RECORD).exists() and not (root / CODE).exists()


def test_links(home: Path, root: Path) -> None:
    """A link to a module, or to a file of the directory, is copied as the file; one to a directory, or to data
    elsewhere, is a link in the copy too.  What is no regular file, leads nowhere or has no UTF-8 name is left out."""
    write(home, {"pack/__init__.py": "", "shared.txt": "within", "../data/secret": "out", "../common.py": "y = 1\n"})
    for name, target in {"a.txt": "../shared.txt", "b.txt": "../../data/secret", "c": "../../data"}.items():
        (home / "pack" / name).symlink_to(target)
    (home / "pack/common.py").symlink_to("../../common.py")
    (home / "pack/nothing").symlink_to("/nowhere")
    os.mkfifo(home / "pack/d")
    Path(os.fsdecode(os.fsencode(home) + b"/pack/caf\xe9.txt")).write_text("x")
    names = {f"home/pack/{name}" for name in ("__init__.py", "a.txt", "b.txt", "c", "common.py")}
    assert begin(root, "pack.f") == names | {"home/shared.txt"}
    place = root / CODE / "home" / "pack"
    assert {path.name for path in place.iterdir() if path.is_symlink()} == {"b.txt", "c"}
    assert [(place / name).read_text() for name in ("a.txt", "b.txt", "c/secret", "common.py")] == [
        *("within", "out", "out", "y = 1\n")
    ]


def test_files_that_cannot_be_read(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, {"mine.py": ""})

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot, "read_regular", denied)
    with pytest.raises(HpcrlError, match=r"mine\.py cannot be copied.*denied.*--live-code"):
        begin(root, "mine.f")


def test_functions_of_held_out_sets(home: Path) -> None:
    """Rewards of --rm-type, and those of the sets of --eval-config, are functions of the run as well."""
    write(home, {"eval.yaml": json.dumps({"eval": {"datasets": [
        {"name": "a", "path": "a.jsonl", "custom_rm_path": "three.f"}]}})})  # fmt: skip
    options = Options(rm_type=["math:1", "one.f:0.5"], rollout_sample_hook_path=["two.g"], input_key="x")
    options = options.model_copy(update={"eval_config": str(home / "eval.yaml"), "label_key": "y"})
    assert [*function_paths(options)] == ["one.f", "two.g", "three.f"]


# ---- which of both a process imports

LOOK = """\
import sys
from pathlib import Path
from hpcrl.run.code_files import use_code
use_code(Path(sys.argv[1]))
import subprocess
if len(sys.argv) == 2:
    sys.exit(subprocess.run([sys.executable, "-m", "look", sys.argv[1], "child"]).returncode)
from hpcrl.config.custom_functions import load_object
print(load_object("mine.where", "--x"))
"""


def looked(root: Path, home: Path) -> str:
    """Where a process started in `home` with `python -m`, as roles are, imports the module from."""
    place = {**os.environ, "PYTHONPATH": str(REPO)}
    write(home, {"look.py": LOOK})
    command = [sys.executable, "-m", "look", str(root)]
    return subprocess.run(
        command, cwd=home, env=place, capture_output=True, text=True, check=True, timeout=240
    ).stdout.strip()


def test_the_copy_goes_before_the_original(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process of the run and its stages imports the copy though it starts where the original is; with --live-code the
    original, and with --no-live-code the copy again.  What has changed is said once a resume."""
    write(home, {"mine.py": "where = __file__\n"})
    begin(root, "mine.f")
    (root / "recipe.json").touch()
    (root / "stage").mkdir()
    resume_code(root, None)
    assert not capsys.readouterr().err
    write(home, {"mine.py": "where = __file__ + ' edited'\n"})
    resume_code(root, None)
    said = capsys.readouterr().err
    assert str(home / "mine.py") in said and "--live-code" in said and said.count("\n") == 1
    assert looked(root, home) == looked(root / "stage", home) == str(root / CODE / "home" / "mine.py")
    resume_code(root, True)
    assert looked(root, home) == f"{home / 'mine.py'} edited" and code_folders(root) == []
    assert not capsys.readouterr().err
    resume_code(root, False)
    assert looked(root, home) == str(root / CODE / "home" / "mine.py")


def test_live_from_the_start(home: Path, root: Path, tmp_path: Path) -> None:
    """With --live-code nothing is copied, and nothing can be gone back to."""
    write(home, {"mine.py": ""})
    assert begin(root, "mine.f", live_code=True) == set() and (root / LIVE).exists()
    with pytest.raises(UsageError, match="--no-live-code"):
        resume_code(root, False)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="--live-code"):
        resume_code(other, True)


def test_scripts_of_prepare_commands(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They run once, as they are then: it is said if they are not what they were when the run was begun."""
    write(home, {"make.py": "1", "other.py": "1"})
    begin_code(root, [Options()], [[sys.executable, f"{home}/make.py", "--out", f"{root}/prepared"]], home)
    assert not (root / CODE).exists()
    note_changed_scripts(root)
    assert not capsys.readouterr().err
    write(home, {"make.py": "2", "other.py": "2"})
    note_changed_scripts(root)
    said = capsys.readouterr().err
    assert f"{home}/make.py" in said and "other.py" not in said


def test_a_run_that_begins_has_its_copy(home: Path, root: Path, tmp_path: Path) -> None:
    """`begin_job` makes it, on a login node as well, and the machines' PYTHONPATH counts; a stage cannot be called as
    it is."""
    write(tmp_path / "site", {"theirs.py": ""})
    given = {"custom_rm_path": "theirs.f", "run_dir": str(tmp_path / "begun")}
    flags = {f"grpo.{name}" if name != "run_dir" else name: value for name, value in given.items()}
    recipe = load_recipe(REPO / "examples" / "quickstart.toml")
    recipe.stages[1].values.pop("rm_type", None)
    job = begin_job(recipe, flags, here=False, pythonpath=str(tmp_path / "site"))
    assert copied(job.root) == {"site/theirs.py"} and job.root == tmp_path / "begun"
    assert [file.source for file in read_code_record(job.root).files if not file.place] == [
        str(REPO / "examples" / "arithmetic.py")
    ]
    (home / "r.toml").write_text("[[stage]]\nname = 'code'\n")
    with pytest.raises(UsageError, match="cannot be named"):
        load_recipe(home / "r.toml")


def test_a_role_names_live_code(home: Path, root: Path) -> None:
    """Where a module, or a file, that the copies may lack is not found."""
    write(home, {"mine.py": "import nowhere\n"})
    begin(root, "mine.f")
    code = (
        "import sys\nfrom hpcrl.run.code_files import use_code\nfrom pathlib import Path\nuse_code(Path(sys.argv[1]))\n"
    )
    code += "from hpcrl.config.custom_functions import load_object\nload_object('mine.f', '--x')\n"
    for text in ("import nowhere\n", "open('nowhere.txt')\n"):
        (root / CODE / "home" / "mine.py").write_text(text)
        place = {**os.environ, "PYTHONPATH": str(REPO)}
        command = [sys.executable, "-c", code, str(root)]
        found = subprocess.run(command, capture_output=True, text=True, env=place, timeout=60)
        assert "nowhere" in found.stderr and "hpcrl resume --live-code" in found.stderr
