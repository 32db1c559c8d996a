"""What the layers share: one tiny task for all real runs of a session."""

from __future__ import annotations

import gc
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import layers
from tests.support.able import pytest_configure, pytest_runtest_setup  # noqa: F401
from tests.support.batch import queue  # noqa: F401
from tests.support.caches import machine_forgotten  # noqa: F401
from tests.support.cluster import cluster, cluster_left_clean  # noqa: F401
from tests.support.second_user import second_user  # noqa: F401

pytest_plugins = ["tests.support.cpu_seconds", "tests.support.ranks"]

# What is imported stays, and to look through it for garbage again and again takes a fifth of the imports' time: none is
# looked for until all files are imported (pytest_collection_finish).
gc.disable()

# Processes that tests start find `tests` from any directory.  The environment lends them `hpcrl` alone, as it does to
# users.
REPO = Path(__file__).parent.parent
MOST_FILES = 8192  #: that a test process may have open
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))

# A matrix product in a child that was forked after OpenMP has started threads hangs, and tests fork ranks and engines.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests of weight updates make dozens of gloo groups in one process, each with some hundred sockets.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if soft < MOST_FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST_FILES, hard), hard))
if "PYTEST_XDIST_WORKER" in os.environ:
    # Megatron's decorators are torch.compile, which imports its compiler in each worker: no test of these uses it
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

if TYPE_CHECKING:
    from hpcrl.run.rundir import RunDir
    from tests.support.forked_engines import Nursery
    from tests.support.quick_start import QuickStart

# a loaded machine is slow, not wrong; and an example that failed is printed, on whatever machine
hypothesis.settings.register_profile("hpcrl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hpcrl")


#: the marks of a whole file, as its source says them
MARKED = re.compile(r"^pytestmark = (\[[^]]*\]|.*)", re.MULTILINE)


def left_out(expression: str) -> set[str]:
    """The marks X of an expression of `-m` that has `and not X` in it: what has one of them is not selected."""
    while (shorter := re.sub(r"\([^()]*\)", "~", expression)) != expression:
        expression = shorter
    parts = [] if re.search(r"\bor\b", expression) else re.split(r"\band\b", expression)
    return {found[1] for part in parts if (found := re.fullmatch(r"\s*not\s+(\w+)\s*", part))}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of whose tests none would be selected is not imported: that takes longer than many a test."""
    given = {Path(arg.partition("::")[0]).absolute() for arg in config.args}  # to be told that it is left out
    if collection_path.suffix != ".py" or collection_path in given:
        return None
    expression = config.option.markexpr
    marked = MARKED.search(collection_path.read_text())
    marks = set(re.findall(r"pytest\.mark\.(\w+)", marked[1])) if marked else set()
    return True if marks & left_out(expression) or layers.none_selected(collection_path, expression, marks) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test gets the mark of its layer before -m is read."""
    layers.assign(items)
    layers.dearest_first(items)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI more skipped tests than are recorded are a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "PYTEST_XDIST_WORKER" in os.environ or reporter is None:
        return
    if said := layers.too_many_skipped(session.config.option.markexpr, len(reporter.stats.get("skipped", []))):
        reporter.write_line(said, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage is looked for, among what tests make.

    Under xdist, tests that share an expensive fixture have to be in one group (pytest-xdist issue 1386).
    """
    if session.config.getoption("loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "xdist does not group tests with this pytest"
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_umask() -> Iterator[None]:
    """What starts a run makes its process keep files to their user; the next test's are as before."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and prompt files (tests/support/runs.py)."""
    from tests.support.runs import make_task

    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run directory whose first attempt has begun."""
    from hpcrl.run.rundir import RunDir

    made = RunDir.create(tmp_path / "run")
    made.make_attempt()
    return made


@pytest.fixture(scope="session")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> QuickStart:
    """The README's main job, run whole."""
    from tests.support.quick_start import run_quick_start

    return run_quick_start(tmp_path_factory.mktemp("quick_start"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where vLLM servers are forked."""
    from tests.support.forked_engines import Nursery

    found = Nursery()
    yield found
    found.close()


@pytest.fixture(scope="session", autouse=True)
def registry_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests start is not remembered among the user's runs."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
