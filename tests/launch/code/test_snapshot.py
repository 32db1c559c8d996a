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
from hpcrl.errors import UsageError
from hpcrl.launch.code import snapshot
from hpcrl.launch.code.snapshot import begin_code, note_changed_scripts, resume_code
from hpcrl.launch.job import begin_job
from hpcrl.mpi.file_sync import read_code, write_files
from hpcrl.run.code_files import CODE, RECORD, code_folder, read_code_record
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import LIVE

REPO = Path(__file__).parents[3]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def begin(root: Path, path: str, pythonpath: str | None = None, **more: Any) -> set[str]:
    """Begin a run with the function `path`; what is in RUN/code then."""
    begin_code(root, [Options(custom_rm_path=path, **more)], [], pythonpath)
    return copied(root)


def copied(root: Path) -> set[str]:
    code = root / CODE
    return {str(path.relative_to(code)) for path in code.rglob("*") if not path.is_dir()}


def test_a_module_with_what_it_imports(home: Path, root: Path) -> None:
    """A module of no package is copied with its siblings that it imports, directly or not, and with no others."""
    write(
        home,
        {
            "mine.py": "import helper, json, numpy\nfrom importlib import import_module\nimport_module('late')\n",
            "helper.py": "def f():\n    from deeper import g\n",
            "deeper.py": "g = 1\n",
            "late.py": "",
            "unrelated.py": "",
        },
    )
    assert begin(root, "mine.f") == {"mine.py", "helper.py", "deeper.py", "late.py"}
    assert (root / CODE / "deeper.py").read_text() == "g = 1\n"
    assert {file.source for file in read_code_record(root).files} == {
        str(home / name) for name in ("mine.py", "helper.py", "deeper.py", "late.py")
    }


def test_a_package_is_copied_whole(home: Path, root: Path) -> None:
    """All of a package's directory, with data files and what is imported of other packages, but no caches, environments
    or runs."""
    write(
        home,
        {
            "pack/__init__.py": "",
            "pack/sub/rewards.py": "from ..words import w\nfrom other import x\n",
            "pack/words.py": "w = 1\n",
            "pack/never.py": "",
            "pack/data/list.txt": "x",
            "pack/__pycache__/rewards.pyc": "x",
            "pack/.git/config": "x",
            "pack/env/pyvenv.cfg": "x",
            "pack/env/lib.py": "x",
            "pack/runs/recipe.json": "x",
            "pack/runs/recipe.toml": "x",
            "pack/runs/big.txt": "x",
            "other/__init__.py": "import third\n",
            "third.py": "",
            "fourth.py": "",
        },
    )
    assert begin(root, "pack.sub.rewards.f") == {
        *("pack/__init__.py", "pack/sub/rewards.py", "pack/words.py", "pack/never.py", "pack/data/list.txt"),
        *("other/__init__.py", "third.py"),
    }


def test_folders_without_init_are_not_copied_whole(home: Path, root: Path) -> None:
    """Of a namespace package the modules that are imported are copied, by relative imports too, and packages in it
    whole."""
    write(
        home,
        {
            "src/rewards/mine.py": "from . import near\nfrom .pack import x\nfrom src.far import y\n",
            "src/rewards/near.py": "",
            "src/rewards/pack/__init__.py": "",
            "src/rewards/pack/more.py": "",
            "src/far.py": "",
            "src/other.py": "",
        },
    )
    assert begin(root, "src.rewards.mine.brief") == {
        *("src/rewards/mine.py", "src/rewards/near.py", "src/far.py"),
        *("src/rewards/pack/__init__.py", "src/rewards/pack/more.py"),
    }


def test_data_files_that_a_module_names(home: Path, root: Path) -> None:
    """Files that a module of no package names relative to itself, or to a directory above, come along."""
    text = (
        "import os\nfrom pathlib import Path\nA = Path(__file__).parent / 'data' / 'a.txt'\n"
        "B = os.path.join(os.path.dirname(__file__), 'data', 'b.txt')\nC = Path(__file__).with_name('c.txt')\n"
        "D = Path(__file__).parents[1] / 'top.txt'\nE = '../secret.txt'\n"
    )
    data = {f"low/{name}": "x" for name in ("data/a.txt", "data/b.txt", "data/unnamed.txt", "c.txt")}
    write(home, {"low/mine.py": text, "top.txt": "x", "../secret.txt": "x", **data})
    expected = {"low/mine.py", "low/data/a.txt", "low/data/b.txt", "low/c.txt", "top.txt"}
    assert begin(root, "low.mine.f") == expected


def test_directories_of_pythonpath(home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's directories of PYTHONPATH count, the first before the second; one where packages are installed does
    not, and the machines' own PYTHONPATH takes the place of ours."""
    for name in ("one", "two", "installed"):
        write(tmp_path / name, {"theirs.py": f"where = {name!r}\n"})
    (tmp_path / "installed" / "x.dist-info").mkdir()
    write(home, {"mine.py": "import theirs\n"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    assert begin(root, "mine.f") == {"mine.py", "theirs.py"}
    assert "one" in (root / CODE / "theirs.py").read_text()
    for run, path, found in (("b", "two", {"mine.py", "theirs.py"}), ("c", "installed", {"mine.py"})):
        (tmp_path / run).mkdir()
        assert begin(tmp_path / run, "mine.f", str(tmp_path / path)) == found
    assert "two" in (tmp_path / "b" / CODE / "theirs.py").read_text()


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
    assert begin(root, "plugin.f") == begin(root, "numpy.f") == set() and not capsys.readouterr().err
    assert begin(root, "develop.f") == set() and f"{editable}/develop" in capsys.readouterr().err
    assert begin(root, "nowhere_to_be_found.f") == set() and "nowhere_to_be_found" in capsys.readouterr().err
    assert not (root / RECORD).exists()


def test_links_lead_to_files_within(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link to a regular file of the same directory is copied as the file; one that leads out of it, one to a
    directory and what is no regular file are not."""
    write(home, {"pack/__init__.py": "", "shared.txt": "within", "../secret": "out"})
    (home / "pack/a.txt").symlink_to("../shared.txt")
    (home / "pack/b.txt").symlink_to("../../secret")
    (home / "pack/c").symlink_to("/etc")
    os.mkfifo(home / "pack/d")
    assert begin(root, "pack.f") == {"pack/__init__.py", "pack/a.txt"}
    assert not (root / CODE / "pack/a.txt").is_symlink() and (root / CODE / "pack/a.txt").read_text() == "within"
    assert f"{home}/pack/b.txt" in capsys.readouterr().err
    assert (root / CODE / "pack").stat().st_mode & 0o777 == 0o700


def test_what_is_large_is_told(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many files, and many bytes, are one note that names --live-code; a large data file is linked."""
    write(home, {"pack/__init__.py": "", "pack/large.bin": "x" * 100, "pack/small.bin": "x" * 20})
    for name, value in (("LARGE", 50), ("MUCH", 10)):
        monkeypatch.setattr(snapshot, name, value)
    begin(root, "pack.f")
    said = capsys.readouterr().err
    assert said.count("--live-code") == 1 and str(home / "pack/large.bin") in said
    assert (root / CODE / "pack/large.bin").readlink() == home / "pack/large.bin"
    assert {f.place for f in read_code_record(root).files if not f.sha256} == {"pack/large.bin"}


def test_functions_of_held_out_sets(home: Path, root: Path) -> None:
    """Rewards of --rm-type, and those of the sets of --eval-config, are functions of the run as well."""
    write(home, {"one.py": "", "two.py": "", "three.py": "", "eval.yaml": json.dumps({"eval": {"datasets": [
        {"name": "a", "path": "a.jsonl", "custom_rm_path": "three.f"}]}})})  # fmt: skip
    options = Options(rm_type=["math:1", "one.f:0.5"], rollout_sample_hook_path=["two.g"], input_key="x")
    begin_code(root, [options.model_copy(update={"eval_config": str(home / "eval.yaml"), "label_key": "y"})], [])
    assert copied(root) == {"one.py", "two.py", "three.py"}


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
    assert looked(root, home) == looked(root / "stage", home) == str(root / CODE / "mine.py")
    resume_code(root, True)
    assert looked(root, home) == f"{home / 'mine.py'} edited" and code_folder(root) is None
    assert not capsys.readouterr().err
    resume_code(root, False)
    assert looked(root, home) == str(root / CODE / "mine.py")


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
    begin_code(root, [Options()], [[sys.executable, f"{home}/make.py", "--out", f"{root}/prepared"]])
    assert not (root / CODE).exists()
    note_changed_scripts(root)
    assert not capsys.readouterr().err
    write(home, {"make.py": "2", "other.py": "2"})
    note_changed_scripts(root)
    said = capsys.readouterr().err
    assert f"{home}/make.py" in said and "other.py" not in said


def test_hosts_that_do_not_see_the_run(home: Path, root: Path, tmp_path: Path) -> None:
    """The copies are carried to them, and later the mark that they do not count."""
    write(home, {"mine.py": "x = 1\n"})
    begin(root, "mine.f")
    far = RunDir(tmp_path / "far")
    write_files(far, read_code(RunDir(root)))
    assert code_folder(far.root) == far.root / CODE and (far.root / CODE / "mine.py").read_text() == "x = 1\n"
    resume_code(root, True)
    write_files(far, read_code(RunDir(root)))
    assert code_folder(far.root) is None


def test_a_run_that_begins_has_its_copy(home: Path, root: Path, tmp_path: Path) -> None:
    """`begin_job` makes it, on a login node as well, and the machines' PYTHONPATH counts; a stage cannot be called as
    it is."""
    write(home, {"mine.py": "import theirs\n"})
    write(tmp_path / "site", {"theirs.py": ""})
    given = {"custom_rm_path": "mine.f", "run_dir": str(tmp_path / "begun")}
    flags = {f"grpo.{name}" if name != "run_dir" else name: value for name, value in given.items()}
    recipe = load_recipe(REPO / "examples" / "quickstart.toml")
    recipe.stages[1].values.pop("rm_type", None)
    job = begin_job(recipe, flags, here=False, pythonpath=str(tmp_path / "site"))
    assert copied(job.root) == {"mine.py", "theirs.py"} and job.root == tmp_path / "begun"
    assert [file.source for file in read_code_record(job.root).files if not file.place] == [
        str(REPO / "examples" / "arithmetic.py")
    ]
    (home / "r.toml").write_text("[[stage]]\nname = 'code'\n")
    with pytest.raises(UsageError, match="cannot be named"):
        load_recipe(home / "r.toml")
