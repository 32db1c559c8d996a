"""Modules that a copy may not follow: files found by `__file__`, changes of `sys.path`, links, unusual names and sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.code import package_files, trial_import
from hpcrl.launch.code.snapshot import begin_code
from hpcrl.run.code_files import CODE, read_code_record
from tests.launch.code.test_snapshot import REPO, begin, copied, write

RULES = {"rules/a.txt": "x", "rules/b.txt": "x", "other/c.txt": "x"}
HEAD = "import os, sys, glob\nfrom pathlib import Path\nD = os.path.dirname(os.path.abspath(__file__))\nH = Path(D)\n"


@pytest.mark.parametrize(
    "text",
    [
        "R = sorted((Path(__file__).parent / 'rules').glob('*.txt'))",
        "R = os.listdir(os.path.join(D, 'rules'))",
        "def f(x): return open(f'{D}/rules/{x}.txt')",
        "def f(x): return (H / 'rules' / x).read_text()",
        "def f(x): return open(D + '/rules/' + x)",
        "R = glob.glob(os.path.join(D, 'rules', '*.txt'))",
        "R = list(Path(__file__).resolve().with_name('rules').iterdir())",
        "NAME = 'rules'\nfor x in os.walk(H.joinpath(NAME)): pass",
    ],
)
def test_directories_that_a_module_reads(home: Path, root: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that a module names by `__file__` is copied with all of its files, and nothing needs to be said."""
    write(home, {"mine.py": f"{HEAD}{text}\n", **RULES})
    assert begin(root, "mine.f") == {"mine.py", "rules/a.txt", "rules/b.txt"}
    assert not capsys.readouterr().err


def test_directories_that_another_module_reads(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a name of the module that finds them; one that no module uses is not copied."""
    write(home, {"mine.py": "from paths import R\nopen(R / 'a.txt')\n", **RULES})
    write(home, {"paths.py": f"{HEAD}R = H / 'rules'\nO = H / 'other'\n"})
    assert begin(root, "mine.f") == {"mine.py", "paths.py", "rules/a.txt", "rules/b.txt"}
    assert not capsys.readouterr().err
    write(home, {"mine.py": "import paths\nprint(paths.H)\n"})
    begin(root, "mine.f")
    assert f"{home}/paths.py:4 " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "R = sorted(H.glob('*.txt'))",
        "def f(x): return open(os.path.join(D, x))",
        "R = open(Path(__file__).parents[1] / 'secret.txt')",
        "f(H)",
        "sys.path.insert(0, os.environ['HOME'])",
        "sys.path.append('/usr')",
        "sys.path += [os.path.join(D, '..')]",
    ],
)
def test_what_cannot_be_told_from_the_source(
    home: Path, root: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One note names the line, and --live-code."""
    write(home, {"mine.py": f"{HEAD}{text}\n", "../secret.txt": "x", **RULES})
    begin(root, "mine.f")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{home}/mine.py:5 " in said and "--live-code" in said


def test_a_large_directory_of_data_is_told(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not copied."""
    write(home, {"mine.py": f"{HEAD}os.listdir(H / 'rules')\n", **RULES})
    monkeypatch.setattr(package_files, "FEW", 1)
    assert begin(root, "mine.f") == {"mine.py"}
    assert f"{home}/rules has more than 1 files" in capsys.readouterr().err


def test_directories_added_to_sys_path(home: Path, root: Path) -> None:
    """Modules in one that a module finds by `__file__` are copied to where the copy looks for them."""
    write(
        home,
        {
            "mine.py": "import where, helper, pack, late\n",
            "where.py": "import sys\nfrom os.path import dirname, join\n"
            "sys.path.insert(0, join(dirname(__file__), 'lib'))\n",
            "lib/helper.py": "import deeper\n",
            "lib/deeper.py": "",
            "lib/late.py": "",
            "lib/pack/__init__.py": "",
        },
    )
    names = ("helper.py", "deeper.py", "late.py", "pack/__init__.py")
    assert begin(root, "mine.f") == {"mine.py", "where.py", *(f"lib/{name}" for name in names)}


def test_files_above_a_package(home: Path, root: Path) -> None:
    """A module of a package names one outside of it."""
    text = f"{HEAD}W = (Path(__file__).parents[1] / 'data' / 'w.txt').read_text()\n"
    write(home, {"pack/__init__.py": "", "pack/mine.py": text, "data/w.txt": "x", "data/v.txt": "x"})
    assert begin(root, "pack.mine.f") == {"pack/__init__.py", "pack/mine.py", "data/w.txt"}


def test_links_to_what_is_imported(home: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are followed wherever they lead; a link to a directory of data is followed within the user's own."""
    write(
        home,
        {"pack/__init__.py": "", "pack/mine.py": "from pack.common import x\nimport top, theirs\nfrom . import one\n"},
    )
    write(home, {"data/d.txt": "x"})
    write(tmp_path / "far", {"common/__init__.py": "from . import x\n", "common/x.py": "", "top.py": "", "one.py": ""})
    (home / "pack/common").symlink_to("../../far/common")
    (home / "pack/data").symlink_to("../data")
    write(tmp_path / "site-packages", {"theirs/__init__.py": ""})
    (home / "theirs").symlink_to(tmp_path / "site-packages" / "theirs")
    (home / "pack/loop").symlink_to("..")
    (home / "pack/one.py").symlink_to(tmp_path / "far" / "one.py")
    (home / "top.py").symlink_to(tmp_path / "far" / "top.py")
    names = ("__init__.py", "mine.py", "common/__init__.py", "common/x.py", "data/d.txt", "one.py")
    assert begin(root, "pack.mine.f") == {"top.py", *(f"pack/{name}" for name in names)}
    said = capsys.readouterr().err
    assert f"{home}/pack/loop" in said and "common" not in said and "one.py" not in said


def test_what_looks_like_a_run(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is imported is none, whatever is in it, and one that is left out is named."""
    write(home, {"pack/__init__.py": "", "pack/mine.py": "import pack.sub.x\n", "pack/sub/x.py": ""})
    write(home, {f"pack/{folder}/recipe.json": "{}" for folder in ("sub", "run", "cards")})
    write(home, {f"pack/{folder}/recipe.toml": "" for folder in ("sub", "run")})
    names = ("__init__.py", "mine.py", "sub/x.py", "sub/recipe.json", "sub/recipe.toml", "cards/recipe.json")
    assert begin(root, "pack.mine.f") == {f"pack/{name}" for name in names}
    said = capsys.readouterr().err
    assert f"{home}/pack/run " in said and "pack/sub" not in said


def test_a_module_named_like_one_of_python(home: Path, root: Path) -> None:
    """The user's own hides it, and is copied."""
    write(home, {"code/__init__.py": "", "code/r.py": "from . import near\nimport json\n", "code/near.py": ""})
    write(home, {"json.py": ""})
    assert begin(root, "code.r.f") == {"code/__init__.py", "code/r.py", "code/near.py"}


def test_names_that_cannot_be_recorded(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, {"pack/__init__.py": ""})
    Path(os.fsdecode(os.fsencode(home) + b"/pack/caf\xe9.txt")).write_text("x")
    assert begin(root, "pack.f") == {"pack/__init__.py"}
    assert r"pack/caf\xe9.txt" in capsys.readouterr().err


def test_files_that_vanish(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is gone when it is looked at is named; a module is needed."""
    write(home, {"pack/__init__.py": "", "pack/gone.txt": "", "mine.py": ""})
    below = package_files.FoundFiles._below

    def removing(self: package_files.FoundFiles, *given: object) -> object:
        for path in below(self, *given):  # type: ignore[arg-type]
            if path.name == "gone.txt":
                path.unlink()
            yield path

    monkeypatch.setattr(package_files.FoundFiles, "_below", removing)
    assert begin(root, "pack.f") == {"pack/__init__.py"}
    assert "gone.txt cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(package_files.FoundFiles, "_take_package", lambda *_: (home / "mine.py").unlink())
    write(home, {"pack/__init__.py": "import mine\n"})
    with pytest.raises(HpcrlError, match=r"mine\.py .*cannot be copied.*--live-code"):
        begin(root, "pack.f")


def test_packages_without_limit(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files, or more bytes, than a copy may have are refused before anything is copied."""
    write(home, {"pack/__init__.py": "", "pack/a.txt": "x" * 100, "pack/b.txt": "x"})
    for name, value in (("MOST_FILES", 2), ("MOST_BYTES", 50)):
        with monkeypatch.context() as patched:
            patched.setattr(package_files, name, value)
            with pytest.raises(HpcrlError, match="pack: a package of more.*--live-code"):
                begin(root, "pack.f")
    assert not copied(root)


def test_few_texts_of_a_module_are_looked_for(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those are that are names in its directories."""
    write(home, {"low/mine.py": f"W = {[f'word{n}' for n in range(5000)] + ['x.txt']}\n", "low/x.txt": ""})
    asked = []
    is_file = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: asked.append(path) or is_file(path))
    assert begin(root, "low.mine.f") == {"low/mine.py", "low/x.txt"}
    assert len(asked) < 20


def test_large_files_are_linked_as_they_are_named(home: Path, root: Path, tmp_path: Path) -> None:
    """The place where a link leads may be known to this machine alone."""
    linked = tmp_path / "by-link"
    linked.symlink_to(home)
    write(home, {"pack/__init__.py": ""})
    with (home / "pack/large.bin").open("wb") as file:
        file.truncate(package_files.LARGE + 1)
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        begin(root, "pack.f", str(linked))
    finally:
        del os.environ["PYTHONSAFEPATH"]
    assert (root / CODE / "pack/large.bin").readlink() == linked / "pack/large.bin"


# ---- trying the copies

BY_CWD = "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), *['li' + 'b']))\nimport helper\n"


def try_out(root: Path, path: str) -> None:
    begin_code(root, [Options(custom_rm_path=path)], [], str(REPO), runs_here=True)


def test_copies_that_cannot_be_imported_are_refused(home: Path, root: Path, tmp_path: Path) -> None:
    """With what the import says, and only where the original can be; never where there is no doubt."""
    write(home, {"mine.py": f"{BY_CWD}def f(): pass\n", "lib/helper.py": ""})
    with pytest.raises(UsageError, match=r"No module named 'helper'.*--live-code"):
        try_out(root, "mine.f")
    (home / "lib/helper.py").unlink()
    (tmp_path / "b").mkdir()
    try_out(tmp_path / "b", "mine.f")
    (tmp_path / "c").mkdir()
    write(home, {"sure.py": "open('was-run', 'w')\ndef f(): pass\n"})
    try_out(tmp_path / "c", "sure.f")
    assert read_code_record(tmp_path / "c").files and not (home / "was-run").exists()


def test_copies_that_can_be_imported(home: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `__file__` and `sys.path`, the files are where the copies look for them."""
    write(home, {"mine.py": f"{HEAD}sys.path.insert(0, os.path.join(D, 'lib'))\nfrom helper import f\n"})
    write(home, {"lib/helper.py": f"{HEAD}W = [p.read_text() for p in (H / 'rules').iterdir()]\ndef f(): pass\n"})
    write(home / "lib", RULES)
    try_out(root, "mine.f")
    for path in (home / "mine.py", *home.glob("lib/*.py"), *home.glob("lib/rules/*")):
        path.unlink()
    assert not trial_import.refuse_broken_copies(root / CODE, ["mine.f"], str(REPO))
    assert trial_import._tried(str(root / CODE), ["mine.f"], str(REPO)).code == 0
    assert not capsys.readouterr().err


def test_functions_that_take_long_to_import(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run begins all the same, and it is said."""
    monkeypatch.setattr(trial_import, "SECONDS", 1.0)
    write(home, {"mine.py": f"{HEAD}print(H)\nimport time\ntime.sleep(60)\n"})
    try_out(root, "mine.f")
    assert "takes more than 1 s" in capsys.readouterr().err and read_code_record(root).files


def test_a_role_names_live_code(home: Path, root: Path) -> None:
    """Where a module, or a file, that the copies may lack is not found."""
    write(home, {"mine.py": "import nowhere\n"})
    begin(root, "mine.f")
    code = (
        "import sys\nfrom hpcrl.run.code_files import use_code\nfrom pathlib import Path\nuse_code(Path(sys.argv[1]))\n"
    )
    code += "from hpcrl.config.custom_functions import load_object\nload_object('mine.f', '--x')\n"
    for text in ("import nowhere\n", "open('nowhere.txt')\n"):
        (root / CODE / "mine.py").write_text(text)
        place = {**os.environ, "PYTHONPATH": str(REPO)}
        command = [sys.executable, "-c", code, str(root)]
        found = subprocess.run(command, capture_output=True, text=True, env=place, timeout=60)
        assert "nowhere" in found.stderr and "hpcrl resume --live-code" in found.stderr
