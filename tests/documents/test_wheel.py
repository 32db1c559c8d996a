"""The wheel in an environment with nothing but its own requirements: whatever a login node is asked works there,
without a checkout.

What needs torch or vLLM says so, with the way to install them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpcrl.cli.init import TASKS
from hpcrl.config.recipe import load_recipe
from tests.documents.scene import SHIPPED, Scene, make_scene
from tests.documents.texts import REPO, printed
from tests.documents.typed import CONFIG, typed
from tests.documents.which import cheap, helped
from tests.support.able import require
from tests.support.fake_slurm import FakeSlurm
from tests.support.first_steps import begun, typed_in
from tests.support.runs import SubmittedRun, all_gone, rows

pytestmark = pytest.mark.process
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
FIRST = "hpcrl init mine && cd mine && hpcrl run"
REWARD = '"""Not the reward that init wrote."""\n\n\ndef reward(options, sample):\n    return 0.5\n'
SHORT = "--num-rollout 2 --rollout-batch-size 8"  #: behind `hpcrl run`


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    require("checkout")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    for name in files.stdout.splitlines():
        if (REPO / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, source / name, follow_symlinks=False)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (found,) = folder.glob("*.whl")
    return found


def installed(wheel: Path, venv: Path) -> tuple[Path, Path]:
    """Install the wheel, and nothing that it requires, in an environment of its own; its programs and its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=240)
    python = venv / "bin" / "python"
    into = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(into, check=True, capture_output=True, timeout=240)
    return python.parent, next((venv / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the environment's programs."""
    programs, packages = installed(wheel, tmp_path_factory.mktemp("bare") / "venv")
    _lend(packages)
    return programs


def _lend(packages: Path) -> None:
    """What the wheel requires, and what that requires, as links to what is installed here."""
    found, wanted = set[str](), ["hpcrl"]
    while wanted:
        name = wanted.pop()
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
                found.add(need.name)
                wanted.append(need.name)
    for name in found:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def elsewhere(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A user's directory, with the recipes that came with the wheel."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    return make_scene(tmp_path_factory.mktemp("elsewhere"), model, checkout=False)


@pytest.fixture(scope="module")
def copied(bare: Path, elsewhere: Scene) -> Scene:
    """The same directory, after a copy of hpcrl's own recipes as the errors print it."""
    environment = elsewhere.environment(bare)
    lines = {"examples": "hpcrl plan examples/quickstart.toml", "hostfiles": "hpcrl hostfile hostfiles/8x8.txt"}
    assert set(lines) == set(SHIPPED)
    for name, line in lines.items():
        done = subprocess.run(
            ["bash", "-c", line],
            env=environment,
            cwd=elsewhere.folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 2
        (copy,) = re.findall(r"cp -r \S+ \.", done.stderr)
        assert copy.endswith(f"/{name} .")
        subprocess.run(["bash", "-c", copy], env=environment, cwd=elsewhere.folder, check=True, timeout=240)
    return elsewhere


def test_recipes_come_with_the_wheel(copied: Scene) -> None:
    """A recipe that is not there is answered with where hpcrl's own are, and copying them from there is enough."""
    assert (copied.folder / "examples" / "quickstart.toml").is_file()
    assert list((copied.folder / "hostfiles").iterdir())


def test_what_a_login_node_is_asked_works(bare: Path, copied: Scene) -> None:
    commands = [command for command in [*printed(), *helped()] if cheap(command)]
    wrong = []
    for command, (status, said) in zip(commands, typed(commands, copied, bare / "python"), strict=True):
        lacks = command.verb in ("run", "eval") and "--site" not in command.words and "--help" not in command.words
        if lacks and not (status == 2 and "hpcrl[gpu]" in said):
            wrong.append(f"{command.line}: {status}, not told what is not installed: {said[-500:]}")
        elif not lacks and status:
            wrong.append(f"{command.line}: {status}: {said[-500:]}")
    assert not wrong, "\n".join(wrong)


def test_a_folder_to_start_from_comes_with_the_wheel(bare: Path, elsewhere: Scene) -> None:
    """`hpcrl init` says in one line what is not installed; what its recipe prepares with is in the wheel, and a run is
    refused for what is not installed alone."""
    for task in TASKS:
        environment, place = elsewhere.environment(bare), elsewhere.folder
        done = subprocess.run(
            ["hpcrl", "init", f"own-{task}", "--task", task],
            env=environment, cwd=place, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0 and "hpcrl[gpu]" in done.stderr and len(done.stderr.splitlines()) == 1
        (command,) = load_recipe(place / f"own-{task}" / "recipe.toml").prepare
        made = ["python", *command[1:3], "--help"]
        subprocess.run(made, env=environment, cwd=place, capture_output=True, text=True, check=True, timeout=240)
        run = ["hpcrl", "run", f"own-{task}/recipe.toml", "--dry-run"]
        refused = subprocess.run(run, env=environment, cwd=place, capture_output=True, text=True, timeout=240)
        assert refused.returncode == 2 and "hpcrl[gpu]" in refused.stderr, refused.stderr


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and all that is installed here."""
    programs, packages = installed(wheel, tmp_path_factory.mktemp("whole") / "venv")
    lent = [entry for entry in sys.path if Path(entry).name == "site-packages" and os.path.isdir(entry)]
    (packages / "lent.pth").write_text("".join(f"{entry}\n" for entry in lent))  # after the wheel's own
    where = typed_in(packages, "python -c 'import hpcrl; print(hpcrl.__file__)'", programs=programs)
    assert where.startswith(str(packages))
    return programs


@pytest.mark.vllm
def test_folders_with_an_engine_train(whole: Path, tmp_path: Path) -> None:
    """With what the wheel brings alone, at the same time: the folders for tools and agents, as their READMEs say, and the
    first one as the pages say, to its end.  Rewards' tests pass, every run trains, and nothing is left."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(typed_in, tmp_path, FIRST, programs=whole)
        roots = list(pool.map(lambda task: begun(tmp_path, task, SHORT, whole), ("tools", "agents")))
        assert "finished" in first.result()
    for root, steps in zip([*roots, *(tmp_path / "mine" / "runs").glob("mine-*")], (2, 2, 24), strict=True):
        found = [row for row in rows(root) if "train/loss" in row]
        assert len(found) == steps and all(row["train/grad_norm"] > 0 for row in found), root
        assert max(row["rollout/reward"] for row in found) > 0 and all_gone(root, []), root


@pytest.mark.vllm
@pytest.mark.core
def test_the_first_hour(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty directory to a job on Slurm with an own reward, in eight commands."""
    slurm = FakeSlurm(tmp_path / "slurm")
    Path(slurm.env["HPCRL_SITE"]).write_text('layout = "homogeneous"\ntime = "30"\n[trainer]\ngpus_per_node = 2\n')
    for name in ("PATH", "HPCRL_SITE"):
        monkeypatch.setenv(name, slurm.env[name])
    (place := tmp_path / "empty").mkdir()
    typed = functools.partial(typed_in, place, programs=whole)
    typed("hpcrl init mine")
    (place / "mine" / "reward.py").write_text(REWARD)
    small = "--rollout-batch-size 4 --n-samples-per-prompt 2"
    job = SubmittedRun(place / "there")

    def phase() -> str:
        state = job.root / "state.json"
        return json.loads(state.read_text())["phase"] if state.exists() else ""

    try:
        with ThreadPoolExecutor() as pool:
            run = pool.submit(typed, f"hpcrl run mine --num-rollout 1 --run-dir here {small}")
            typed(f"hpcrl submit mine --num-rollout 5000 --run-dir there {small}")
            job.until(lambda: job.steps() > 0 or phase() == "failed")
            assert "running" in (said := typed("hpcrl status there")) and " of 5000" in said, said
            typed("hpcrl stop there")
            job.until(lambda: phase() == "stopped")
            before = job.steps()
            typed("hpcrl resume there")
            job.until(lambda: job.steps() > before or phase() == "failed")
            assert "finished" in run.result()
    finally:
        slurm.end(0)
    assert "comparison.html" in typed("hpcrl report here there")
    found = [row["rollout/reward"] for root in ("here", "there") for row in rows(place / root) if "train/loss" in row]
    assert len(found) - 1 > before and {*found} == {0.5}, found


def test_the_line_of_the_pages() -> None:
    assert FIRST in {command.line for command in printed()}
