"""Rules that a reader relies on: packages import downwards, folders are small, nothing is unpickled."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import nodes, parsed

pytestmark = pytest.mark.lint
ROOT = Path(__file__).parents[1] / "hpcrl"
FILES = sorted(ROOT.rglob("*.py"))

#: the packages from the bottom up: each, and each file of the first level, imports only what lies further down
ORDER = (
    {"__init__", "errors"},
    {"utils"},
    {"config", "sample"},
    {"plan", "microbatches", "algorithms"},
    {"groups"},
    {"run"},
    {"transport"},
    {"sandbox"},
    {"report"},
    {"models"},
    {"planning/formulas", "engine/membership"},
    {"weights"},
    {"rollout", "engine", "trainer"},
    {"launch"},
    {"planning"},
    {"doctor"},
    {"cli"},
    {"api"},
    {"__main__"},
)
PLACE = {package: number for number, packages in enumerate(ORDER) for package in packages}
#: what takes seconds to import
HEAVY = {"torch", "vllm", "megatron", "transformers", "ray"}
#: folders and files that a login node uses, where nothing heavy is imported at the top of a file
LIGHT = {
    "api.py",
    "cli/",
    "config/",
    "doctor/",
    "errors.py",
    "groups.py",
    "launch/",
    "plan.py",
    "planning/formulas/",
    "planning/memory/",
    "report/",
    "rollout/prompts/first_rows.py",
    "rollout/prompts/row_checks.py",
    "rollout/prompts/rows.py",
    "run/",
    "sample.py",
    "sandbox/",
    "models/lora/",
    "utils/",
    "weights/colocation.py",
    "weights/redistribution/",
}
MOST = 40  #: files in one folder
#: modules that read files past utils/untrusted_files.py, and what they read: nothing that lies in a run directory, or that a
#: user names
READERS = {
    "utils/untrusted_files.py": "the one reader",
    "engine/loading/disk_weights.py": "safetensors files, as large as a model",
    "models/files/torch_dist.py": "checkpoints, as large as a model",
    "rollout/prompts/rows.py": "prompt files, read row by row",
    "utils/plugins.py": "the package's own source; lies below the reader",
}
#: modules that write files past `write_atomic`, `write_first`, `open_append` and `touch`, and what they write
WRITERS = {
    "cli/main.py": "/dev/null",
    "run/compile_cache/archive.py": "archives as large as compiled code, next to what they take the place of, then renamed",
    "cli/options.py": "what --write names",
    "cli/selftest.py": "what --report names",
    "doctor/directories.py": "a probe",
    "run/heartbeat.py": "a few bytes every few seconds, which need not be on disk",
    "models/files/config_json.py": "a model's directory, which is put into its place as a whole",
    "models/files/hf_writer.py": "a model's directory, which is put into its place as a whole",
    "launch/mpi/mpirun.py": "a hostfile in a scratch directory",
    "planning/rehearsal/engine_process.py": "a scratch directory",
    "planning/rehearsal/process.py": "a scratch directory",
    "planning/rehearsal/runner.py": "a scratch directory",
    "report/metrics.py": "TensorBoard's own files",
    "report/timeline/spans.py": "spans, the cheapest way, or none at all",
    "run/rundir.py": "write_atomic, write_first, write_unread",
    "run/scratch.py": "a scratch directory and its lock",
    "run/storage_errors.py": "a probe",
    "doctor/selftest/tiny_model.py": "a model in a scratch directory",
    "doctor/selftest/whole_run.py": "a recipe and a log in a scratch directory",
    "cli/import_script.py": "a scratch directory",
    "config/slime/launcher.py": "inside the sandbox, which ends with it",
    "sandbox/inside/files.py": "inside a box, which ends with it",
    "sandbox/inside/kernel.py": "/proc",
    "sandbox/kinds.py": "an empty root in a temporary directory",
    "sandbox/watcher.py": "/dev/null",
    "sandbox/run.py": "what a confined command has left, into a directory of the caller's",
    "sandbox/slime_script.py": "a scratch directory",
    "trainer/checkpoint/copy_files.py": "parts of a copy in memory, and of a checkpoint; their index comes last",
    "trainer/checkpoint/save_load.py": "a probe",
    "utils/untrusted_files.py": "open_append",
    "weights/disk.py": "safetensors files, as large as a model",
}
#: the files that choose mpirun
CHOOSERS = {"cli/hostfile.py", "cli/launch.py", "cli/plan.py"}
#: a word of Slurm's own: its commands, its states
SLURMS = re.compile(r"(?i:\b(sbatch|squeue|scancel|scontrol|sacct|sinfo)\b)|\b(NODE_FAIL|OUT_OF_MEMORY|PREEMPTED)\b")
#: where one may stand outside of launch/slurm: help, a site's keys
SLURMS_ALLOWED = {
    "launch/mpi/mpirun.py",
    "cli/main.py",
    "cli/hostfile.py",
    "cli/submit.py",
    "cli/doctor.py",
    "launch/site.py",
    "cli/resume.py",
    "launch/mpi/hostfile.py",
}


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether at the top of the file) of every import."""
    at_top = {id(node) for node in parsed(path).body}
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"hpcrl.{alias.name}" for alias in node.names] if node.module == "hpcrl" else [node.module]
        yield from ((node.lineno, name, id(node) in at_top) for name in names)


def words(path: Path) -> Iterator[ast.Constant]:
    """The texts in a file's code, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told = {id(node.body[0].value) for node in nodes(path) if isinstance(node, documented) and ast.get_docstring(node)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node


def package(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return next((name for name in ("/".join(parts[:2]), parts[0]) if name in PLACE), "/".join(parts))


def package_of(module: str) -> str:
    """The package that an import of `hpcrl...` leads to; names of hpcrl itself, such as __version__, lie in its __init__."""
    parts = module.split(".")[1:]
    return next((name for name in ("/".join(parts[:2]), "/".join(parts[:1])) if name in PLACE), "__init__")


def test_every_package_has_its_place() -> None:
    assert {package(path) for path in FILES} == set(PLACE)


def test_packages_import_downwards() -> None:
    for path in FILES:
        here = package(path)
        light = str(path.relative_to(ROOT)).startswith(tuple(LIGHT)) and path.name != "device_copies.py"
        for line, module, top in imports(path):
            there = package_of(module)
            if module.split(".")[0] == "hpcrl" and there != here:
                assert PLACE[there] < PLACE[here], f"{path}:{line}: {here} imports {module}, which is not below it"
            if light and top:
                assert module.split(".")[0] not in HEAVY, f"{path}:{line}: imports {module} at the top"


def test_mpirun_is_named_by_choosers() -> None:
    """By import or as text."""
    for path in FILES:
        name = str(path.relative_to(ROOT))
        named = [(line, module) for line, module, _ in imports(path)]
        named += [(node.lineno, node.value) for node in words(path) if node.value.startswith("hpcrl.")]
        for line, module in named:
            if re.match(r"hpcrl\.launch\.mpi\b", module) and path.parent.name != "mpi":
                assert name in CHOOSERS, f"{path}:{line}: names {module}"


def test_one_file_chooses_code_of_cpus() -> None:
    """Ranks with CUDA import nothing of trainer/cpu, at the top of a file or later."""
    for path in FILES:
        if path.parent != ROOT / "trainer/cpu" and path.name != "replaced.py":
            for line, module, _ in imports(path):
                assert not module.startswith("hpcrl.trainer.cpu"), f"{path}:{line}: imports {module}"


def test_only_launch_slurm_speaks_slurm() -> None:
    """In code: comments and docstrings may tell of Slurm by way of example."""
    for path in FILES:
        if path.parent.name == "slurm" or str(path.relative_to(ROOT)) in SLURMS_ALLOWED:
            continue
        for node in words(path):
            assert not SLURMS.search(node.value), f"{path}:{node.lineno}: {node.value!r}"
        for node in nodes(path):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert not SLURMS.search(name), f"{path}:{node.lineno}: {name}"


def test_no_folder_is_a_heap() -> None:
    for folder in sorted({path.parent for path in FILES}):
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST, f"{folder} holds {len(files)} files: divide it"


def test_nothing_is_unpickled_or_evaluated() -> None:
    for path in FILES:
        for line, module, _ in imports(path) if path.parent.name != "pickles" else ():
            assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{path}:{line}"
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


def reads(node: ast.AST) -> bool:
    """Whether this calls `read_bytes`, `read_text`, the built-in `open`, or `.open` to read."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open" and not written(mode(node, 1) or "r")
    if not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in ("read_bytes", "read_text") or (
        node.func.attr == "open" and mode(node, 0) in ("r", "rb", "rt", "r+", "rb+", "r+b")
    )


def mode(call: ast.Call, place: int) -> str | None:
    """The mode that a call of `open` is given as its argument number `place`."""
    given = call.args[place].value if len(call.args) > place and isinstance(call.args[place], ast.Constant) else None
    return given if isinstance(given, str) else None


def written(given: str | None) -> bool:
    return bool(given) and len(given) < 4 and bool(set(given) & set("wax+")) and set(given) <= set("wax+rbt")


def writes(node: ast.AST) -> bool:
    """Whether this calls `write_bytes`, `write_text`, or opens a file to write to it."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("O_WRONLY", "O_RDWR")
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "open":
        return written(mode(node, 1 if isinstance(node.func, ast.Name) else 0))
    made = ("write_bytes", "write_text", "touch", "NamedTemporaryFile", "mkstemp")
    return isinstance(node.func, ast.Attribute) and name in made


def test_files_are_read_by_the_one_reader() -> None:
    """What lies in a run directory may be a FIFO, a link or endless: `untrusted_files` reads it.  READERS is exact."""
    found = {str(path.relative_to(ROOT)) for path in FILES if any(map(reads, nodes(path)))}
    assert not found - set(READERS), "read files by hpcrl/utils/untrusted_files.py"
    assert not set(READERS) - found, "READERS names modules that read nothing"


def test_files_are_written_by_the_one_writer() -> None:
    """A reader sees the old file or the new one, and a link in a file's place is not followed.  WRITERS is exact."""
    found = {str(path.relative_to(ROOT)) for path in FILES if any(map(writes, nodes(path)))}
    assert not found - set(WRITERS), "write files by write_atomic, write_first or open_append"
    assert not set(WRITERS) - found, "WRITERS names modules that write nothing"


def test_files_are_short_and_say_what_they_are_for() -> None:
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        tree = parsed(path)
        assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                said = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                assert node.end_lineno - node.lineno - said < 60, f"{path}:{node.lineno} {node.name} is long"


def test_nothing_stands_behind_what_starts_a_program() -> None:
    """Below `if __name__ == "__main__"` a name is not yet there when the program runs, and ruff does not see it."""
    for path in FILES:
        for node in parsed(path).body[:-1]:
            assert not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)), f"{path}:{node.lineno}"


def test_one_file_makes_stores_of_torch() -> None:
    """They would listen on every interface."""
    makers = {"TCPStore", "StatelessProcessGroup", "stateless_init_process_group", "trainer_init"}
    for path in FILES:
        made = [ast.unparse(n.func) for n in nodes(path) if isinstance(n, ast.Call)]
        if path.name != "torch_store.py":
            assert not makers & {name.rpartition(".")[2] for name in made}, path


def test_nobody_listens_on_every_interface() -> None:
    for path in FILES:
        for node in nodes(path):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.strip() in {"0.0.0.0", "tcp://*", "::"}
            ):
                pytest.fail(f"{path}:{node.lineno}")


def test_one_deadline_and_one_plugin_folder() -> None:
    """A moment in the future is a `Deadline`, unless it is when to look or ask again; plug-ins are a `PluginFolder`."""
    again = {
        "engine/membership/broadcast.py": "when it looks at the engines",
        "weights/pieces/device_transport.py": "when it looks at its peers",
    }
    sums = set()
    for path in FILES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if package(path) == "utils":
            continue
        assert "iter_modules" not in text and 'glob("*.py")' not in text, f"{name}: use hpcrl/utils/plugins.py"
        if "monotonic() +" in text:
            sums.add(name)
    assert not sums - set(again), "use hpcrl/utils/waiting.py"
    assert not set(again) - sums, "these have none any more"


def compares_silence(node: ast.AST) -> bool:
    """Whether this compares `time.monotonic() - then` with something."""
    return isinstance(node, ast.Compare) and any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and ast.unparse(part.left) == "time.monotonic()"
        for part in ast.walk(node)
    )


def test_there_is_one_sign_of_life() -> None:
    """Since when somebody was not heard of, or we gave no sign, is a `LastSign`."""
    health = {"rollout/engines/external.py"}  # of engines
    found = {str(path.relative_to(ROOT)) for path in FILES if any(map(compares_silence, nodes(path)))}
    assert found <= health, "use hpcrl/utils/waiting.py"


def within(loop: ast.AST) -> Iterator[ast.AST]:
    """What a loop does itself: not in functions that it declares, and not in loops inside of it."""
    todo = list(loop.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.For | ast.While):
            todo += ast.iter_child_nodes(node)


def tries_again(loop: ast.AST) -> bool:
    """Whether a loop sleeps, leaves from inside a `try`, and goes round again after what that may raise."""
    found = list(within(loop))
    called = {ast.unparse(node.func).rpartition(".")[2] for node in found if isinstance(node, ast.Call)}
    return bool(called & {"sleep", "wait"}) and any(
        isinstance(node, ast.Try)
        and any(isinstance(inner, ast.Return | ast.Break) for part in node.body for inner in ast.walk(part))
        and any(not isinstance(handler.body[-1], ast.Raise | ast.Return | ast.Break) for handler in node.handlers)
        for node in found
    )


def grows(node: ast.AST) -> bool:
    """Whether this makes a pause longer: `pause = min(2 * pause, ...)`, or a sleep of `... ** attempt`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        products = [
            part for part in ast.walk(node.value) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
        ]
        return "pause" in name and any(name in {ast.unparse(part.left), ast.unparse(part.right)} for part in products)
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("sleep")
        and any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow) for part in ast.walk(node))
    )


def test_there_is_one_way_to_try_again() -> None:
    """What may pass is tried again by `retry`, and pauses that grow are `Pauses`."""
    for path in FILES:
        if package(path) == "utils":
            continue
        for node in nodes(path):
            loop = isinstance(node, ast.For | ast.While) and tries_again(node)
            assert not (loop or grows(node)), f"{path}:{node.lineno}: use hpcrl/utils/waiting.py"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("while True:\n try:\n  return ask()\n except OSError:\n  pass\n time.sleep(1)", True),
        ("for attempt in range(3):\n try:\n  found = ask()\n  break\n except OSError:\n  await asyncio.sleep(1)", True),
        ("pause = min(2 * pause, 1.0)", True),
        ("time.sleep(2**attempt)", True),
        ("while True:\n try:\n  return ask()\n except OSError:\n  raise\n time.sleep(1)", False),
        ("while not done():\n time.sleep(pause)", False),
    ],
)
def test_a_retry_is_seen(code: str, found: bool) -> None:
    tree = list(ast.walk(ast.parse(code)))
    assert any((isinstance(node, ast.For | ast.While) and tries_again(node)) or grows(node) for node in tree) == found


def loose_parameters(node: ast.AST) -> list[str]:
    """The parameters or fields that a docstring describes outside of a section, where no tool finds them."""
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    else:
        names = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(" "))
    return [
        found
        for found in re.findall(r"(?:^|(?<=[.;] )|(?<=[.;]  ))`?(\w+)`?(?:, \w+)*: ", prose, re.M)
        if found in names
    ]


def torn(node: ast.AST) -> list[str]:
    """What a formatter has torn apart or run together in a docstring: a paragraph of one word, and under the name of a
    parameter or field the description of another one, or text that belongs to none."""
    text = ast.get_docstring(node) or ""
    found = [part for part in text.split("\n\n")[1:] if len(part.split()) == 1]
    names = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
    names |= {
        name.target.id
        for name in ast.walk(node)
        if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name)
    }
    for _, section in re.findall(r"^(Args|Attributes):\n((?: +.*\n?|\n(?= ))+)", text, re.M):
        for entry in re.split(r"^ {4}(?! )", section, flags=re.M)[1:]:
            head, sign, said = " ".join(entry.split()).partition(":")
            found += [] if sign else [head]
            found += [
                word for word in re.findall(r"[.:;,] (\w+): ", said) if word in {*names, "Report", "Source", "Returns"}
            ]
    return found


def test_docstrings_are_in_googles_style() -> None:
    """Sphinx's napoleon, griffe and editors read `Args:`, `Attributes:`, `Returns:` and `Raises:`; ruff looks at their
    form."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                loose = loose_parameters(node)
                assert not loose, f"{path}:{node.lineno}: {', '.join(loose)}: put under Args: or Attributes:"
                assert not torn(node), f"{path}:{node.lineno}: {torn(node)}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('def f(a, b):\n    """What.\n\n    a: bytes\n    """', ["a"]),
        ('def f(a, b):\n    """What.  a: bytes; b: seconds."""', ["a", "b"]),
        ('def f(a, b):\n    """What.\n\n    Args:\n        a: bytes\n    """', []),
        ('class F:\n    """What.  a: bytes."""\n    a: int', ["a"]),
    ],
)
def test_a_loose_parameter_is_seen(code: str, found: list[str]) -> None:
    assert loose_parameters(ast.parse(code).body[0]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What.\n\n    tensor.\n", ["tensor."]),
        ("What.\n\n    Args:\n        a: bytes; b: seconds.\n", ["b"]),
        ("What.\n\n    Args:\n        a: bytes. Source: a paper.\n        b: seconds.\n", ["Source"]),
        ("What.\n\n    Args:\n        a: bytes, and what is put\n        behind it.\n", ["behind it."]),
        ("What.\n\n    Args:\n        a: bytes; None: all, as\n            in b.\n        b: seconds.\n    ", []),
    ],
)
def test_a_torn_docstring_is_seen(text: str, found: list[str]) -> None:
    assert torn(ast.parse(f'def f(a, b):\n    """{text}"""').body[0]) == found


def test_public_class_names_are_unique() -> None:
    found: dict[str, str] = {}
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in found, f"{path.relative_to(ROOT)} and {found[node.name]}: {node.name}"
                found[node.name] = str(path.relative_to(ROOT))


#: words that a reader of code or pages stumbles over -> what to write instead
REFUSED = {
    r"beside": "next to, with, along with, in addition to, compared with, during",
    r"(who|what)soever|whoever": "the process (user, caller, host ...) that",
    r"nobody|somebody": "no process, a peer, another user: say who; or use the passive",
    r"anew": "again, from the start; or a verb with re-",
    r"mends?|mended": "fix, repair; what to do about an error is its hint",
    r"(goes|go|went|gone)\s+on": "continue, resume, proceed; or say what is done",
    r"lets? us in": "accept the connection",
}


def test_words_that_are_not_written() -> None:
    """In comments, docstrings and texts of the package, and in the pages."""
    refused = re.compile(rf"(?i)\b({'|'.join(REFUSED)})\b")
    repo = ROOT.parent
    texts = [(path, path.read_text()) for path in (*repo.glob("docs/*.md"), *repo.glob("sites/*.toml"))]
    texts += [(path, path.read_text()) for path in (repo / "README.md", repo / "CONTRIBUTING.md")]
    for path in FILES:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        texts += [(path, token.string) for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    for path, text in texts:
        if found := refused.search(text):
            instead = next(say for word, say in REFUSED.items() if re.fullmatch(word, found[0], re.IGNORECASE))
            pytest.fail(f"{path.relative_to(repo)}: {found[0]}: {instead}")


def test_every_package_says_what_it_is_for() -> None:
    for path in FILES:
        if path.name == "__init__.py" and any(path.parent.glob("[!_]*.py")):
            assert ast.get_docstring(parsed(path)), f"{path.relative_to(ROOT)} has no docstring"


def test_docstrings_name_files_that_are_there() -> None:
    """What a package's docstring puts in backquotes as a file is one of the package, or a path of the package."""
    for path in FILES:
        if path.name == "__init__.py":
            for name in re.findall(r"`([\w/]+\.py)`", ast.get_docstring(parsed(path)) or ""):
                there = [(base / name).exists() for base in (path.parent, path.parent.parent, ROOT, ROOT.parent)]
                assert any(there) or "NAME" in name, f"{path.relative_to(ROOT)}: {name}"


def test_ten_files_to_read_first() -> None:
    text = (ROOT.parent / "docs/development.md").read_text()
    files = re.findall(r"(?m)^\d+\. `(hpcrl/[\w/]+\.py)`", text)
    assert len(files) == 10 and all((ROOT.parent / name).is_file() for name in files), files


def test_pages_name_files_that_are_there() -> None:
    """What docs/development.md and CONTRIBUTING.md put in backquotes as a path of the package or the tests."""
    repo = ROOT.parent
    for page in ("docs/development.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w./]+(?:\.py|/))`", (repo / page).read_text()):
            first = path.split("/")[0]  # one that is no folder of these is relative to what the row is about
            if "NAME" not in path and "/" in path and ((ROOT / first).is_dir() or (repo / first).is_dir()):
                assert (ROOT / path).exists() or (repo / path).exists(), f"{page}: {path}"
