"""Own modules are found as a role finds them, without any of their code being run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.custom_functions import missing
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import missing_functions

HERE = "tests.config.test_module_search"
NUMBER = 3
#: what stands in every own module of these tests but the last line runs into an error when it is imported
BESIDE = (
    "from os.path import join as bought\ntry:\n    later = 1\nexcept Exception:\n    pass\ndef good(): gone()\n1 / 0\n"
)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{HERE}.write", ""),
        (f"{HERE}.NUMBER", ""),
        (f"{HERE}.absent", f"{HERE} has no absent"),
        ("no_such_module.f", "there is no module no_such_module"),
        ("tests.no_such_module.f", "there is no module tests.no_such_module"),
        ("beside.good", ""),
        ("beside.bought", ""),
        ("beside.later", ""),
        ("beside.gone", "beside has no gone"),
        ("beside.more.f", "beside is not a package"),
        ("src.rewards.mine.good", ""),
        ("src.rewards.yours.good", "there is no module src.rewards.yours"),
        ("src.mine.good", "there is no module src.mine"),
        ("package.inner.mine.good", ""),
        ("open_ended.whatever", ""),
        ("broken.f", ""),
        ("math.hypot", ""),
        ("msgspec.json.encode", ""),
        ("two", ""),
    ],
)
def test_found_without_being_run(path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the directory where the run is started, too; what files do not show is left to the run."""
    monkeypatch.chdir(tmp_path)
    for name in ("beside.py", "src/rewards/mine.py", "package/inner/mine.py"):
        write(tmp_path / name)
    (tmp_path / "package" / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "open_ended.py").write_text("def __getattr__(name): return 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert missing(path)[0] == why


def write(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(BESIDE)


def test_hints_name_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "beside.py")
    assert missing("beside.goood")[1].endswith("beside.py defines good")
    assert str(tmp_path) in missing("no_such_module.f")[1]
    write(tmp_path / "packaging" / "mine.py")
    assert str(tmp_path / "packaging") in missing("packaging.mine.good")[1], "an installed package hides the directory"


#: a module -> why f of it cannot be called with options and sample, "" where that is not known before it is imported
WRITTEN = {
    "def f(options, sample, **kwargs): pass": "",
    "async def f(options, sample=None): pass": "",
    "def f(*given): pass": "",
    "def f(options, sample, /, *, k=1): pass": "",
    "def f(sample): pass": "takes (sample): too many positional arguments",
    "def f(options, sample, more): pass": "takes (options, sample, more): missing a required argument: 'more'",
    "def f(*, options, sample): pass": "takes (options, sample): too many positional arguments",
    "def f(options, sample, *, more): pass": "takes (options, sample, more): missing a required argument: 'more'",
    "def f(prompts, completions, **kwargs): pass": "takes (prompts, completions, kwargs), which is TRL's form of a reward",
    "def f(completions, **kwargs): pass": "takes (completions, kwargs), which is TRL's form of a reward",
    "def f(data_source, solution_str, ground_truth, extra_info=None): pass": (
        "takes (data_source, solution_str, ground_truth, extra_info), which is verl's form of a reward"
    ),
    "import functools\n@functools.cache\ndef f(sample): pass": "",
    "def f(sample): pass\nf = print": "",
    "if 1:\n    def f(sample): pass": "",
    "class f:\n    def __call__(self, options, sample): pass": "",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_signatures_are_read_from_the_text(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plain function, before anything is imported, and so in every dry run; it is what Python itself says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "written_here.py").write_text(text + "\n1 / 0\n")
    why, hint = missing("written_here.f", (), ("options", "sample"))
    assert why == WRITTEN[text]
    assert not why or "def f(options, sample)" in hint or "docs/from-" in hint
    (error,) = missing_functions(Options(custom_rm_path="written_here.f")) if why else (None,)
    assert error is None or str(error).startswith(f"--custom-rm-path written_here.f: {why}")


#: top-level folders of the checkout that hpcrl may be installed from
FOLDERS = ("tests", "tools", "examples", "bench", "docs", "launch", "sites", "sbatch", "hostfiles")


@pytest.mark.parametrize("package", [False, True], ids=["folder", "package"])
def test_own_folder_named_as_the_checkouts(tmp_path: Path, package: bool) -> None:
    """In a fresh interpreter, as an installed `hpcrl` is: the checkout lends it nothing but the package hpcrl."""
    for folder in FOLDERS:
        write(tmp_path / folder / "mine.py")
        if package:
            (tmp_path / folder / "__init__.py").touch()
    code = (
        "import sys; from hpcrl.config.custom_functions import missing; print([missing(f'{f}.mine.good') for f in "
        "sys.argv[1:]])"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, *FOLDERS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.strip() == str([("", "")] * len(FOLDERS))
