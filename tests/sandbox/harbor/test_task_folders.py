"""Task folders: what is read of them, what is refused and how it is named, and what makes them a prompt file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord, read_word
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.first_rows import findings, look_at
from hpcrl.rollout.prompts.row_checks import Keys, keys_in, read_row
from hpcrl.rollout.prompts.rows import open_rows
from hpcrl.sandbox.harbor.rows import TaskRows, task_of
from hpcrl.sandbox.harbor.task import HarborTask, read_images, read_task, solution
from tests.support.harbor_tasks import TOML, write_task

AGENT = "hpcrl.rollout.samplers.harbor_agent.generate"


def read(folder: Path) -> HarborTask:
    return read_task(folder, read_images(folder.parent))


def test_a_task(tmp_path: Path) -> None:
    """Its prompt, its two sets of files, its limits; storage is memory, so it is half of that at most."""
    task = read(write_task(tmp_path / "sum"))
    assert (task.name, task.image, task.workdir) == ("sum", "system", "/app")
    assert [(file.path, file.data, file.mode) for file in task.files] == [
        ("/app/data/numbers.txt", b"3\n4\n5\n", 0o644)
    ]
    assert [file.path for file in task.tests] == ["/tests/test.sh"]
    assert [file.path for file in solution(task)] == ["/solution/solve.sh"]
    assert (task.config.agent.timeout_sec, task.config.verifier.timeout_sec) == (60.0, 10.0)
    assert (task.config.limits.memory, task.config.limits.disk) == (256 << 20, 128 << 20)


def test_variables_and_what_is_passed_over(tmp_path: Path) -> None:
    """Artifacts are for people, and keys of features that are switched off ask for nothing."""
    toml = 'artifacts = ["out/log", {source = "/data"}]\n' + TOML
    toml = toml.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"\nenv = {A = "1"}')
    toml = toml.replace("[environment]", '[environment]\nenv = {B = "${HOME:-x}", C = ""}\nworkdir = "/srv/here"')
    toml += "gpus = 0\nallow_internet = false\nmcp_servers = []\nallowed_hosts = []\n"
    task = read(write_task(tmp_path / "sum", toml))
    assert task.config.environment.env == {"B": "x", "C": ""} and task.config.verifier.env == {"A": "1"}
    assert task.workdir == "/srv/here"


def test_sizes_of_older_versions(tmp_path: Path) -> None:
    toml = TOML.replace("memory_mb = 256", 'memory = "0.5G"').replace("storage_mb = 10240", 'storage = "128M"')
    limits = read(write_task(tmp_path / "sum", toml)).config.limits
    assert (limits.memory, limits.disk) == (512 << 20, 128 << 20)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("allow_internet", "[environment]\nallow_internet = true"),
        ("network_mode", '[agent]\nnetwork_mode = "public"'),
        ("network_mode", '[environment]\nnetwork_mode = "allowlist"'),
        ("allowed_hosts", '[verifier]\nallowed_hosts = ["a.org"]'),
        ("gpus", "[environment]\ngpus = 1"),
        ("tpu", '[environment]\ntpu = {type = "v6e", topology = "2x2"}'),
        ("mcp_servers", '[environment]\nmcp_servers = [{name = "a", url = "http://a"}]'),
        ("healthcheck", '[environment]\nhealthcheck = {command = "true"}'),
        ("os", '[environment]\nos = "windows"'),
        ("user", '[agent]\nuser = "agent"'),
        ("separate", '[verifier]\nenvironment_mode = "separate"'),
        ("environment", '[verifier]\nenvironment = {docker_image = "a"}'),
        ("collect", '[verifier]\ncollect = [{command = "true"}]'),
        ("SECRET", '[verifier]\nenv = {KEY = "${SECRET}"}'),
        ("steps", '[[steps]]\nname = "one"'),
        ("workdir", '[environment]\nworkdir = "src"'),
        ("verifier.env", '[verifier]\nenv = {"A=B" = "1"}'),
        ("environment.env", "[environment]\nenv = {A = 1}"),
        ("timeout_sec", "[agent]\ntimeout_sec = inf"),
        ("timeout_sec", "[agent]\ntimeout_sec = -1"),
        ("memory", '[environment]\nmemory = "2T"'),
        ("memory_mb", "[environment]\nmemory_mb = 32"),
        ("schema_version", 'schema_version = "2.0"'),
        ("later_key", "[agent]\nlater_key = 3"),
        ("cannot be read", "= 3"),
    ],
)
def test_what_a_task_must_not_ask_for(key: str, line: str, tmp_path: Path) -> None:
    """Each is one error, which names the task's file and the key."""
    with pytest.raises(DataError, match=rf"sum/task\.toml.*{key}"):
        read(write_task(tmp_path / "sum", line + "\n"))


def test_images(tmp_path: Path) -> None:
    """Of docker_image, or of the task, by its folder or its name: what its Dockerfile builds, with the files in it."""
    folder = write_task(tmp_path / "sum")
    (tmp_path / "images.toml").write_text("")
    named = r'sum: no directory is named for the image debian:12; .*--sandbox DIR.*"debian:12" = "DIR".*images\.toml'
    with pytest.raises(DataError, match=named):
        read(folder)
    (folder / "task.toml").write_text(TOML.replace('docker_image = "debian:12"', ""))
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nRUN make\n")
    with pytest.raises(DataError, match='sum: no directory .* the image sum; .*"sum" = "DIR"'):
        read(folder)
    (tmp_path / "built").mkdir()
    for name in ("sum", "tests/sum"):
        (tmp_path / "images.toml").write_text(f'"{name}" = "built"\n')
        task = read(folder)
        assert (task.image, task.files, task.workdir) == (str(tmp_path / "built"), (), "/work")
    (tmp_path / "built" / "app").mkdir()
    assert read(folder).workdir == "/app" and read(folder).digest != task.digest
    (tmp_path / "images.toml").write_text('sum = "/not/here"\n')
    with pytest.raises(DataError, match=r"images\.toml: the image /not/here"):
        read(folder)


def test_a_digest_is_of_all_that_is_seen(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum")
    digests = {read(folder).digest}
    for name, text in (
        ("task.toml", TOML + 'env = {A = "1"}\n'),
        ("instruction.md", "Another.\n"),
        ("environment/more", ""),
        ("tests/more", "1"),
    ):
        (folder / name).write_text(text)
        digests.add(read(folder).digest)
    (folder / "tests" / "more").chmod(0o755)
    assert len(digests | {read(folder).digest}) == 6


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "steps", "trajectory.json", "tests/.harborignore"])
def test_files_that_are_not_read(name: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum")
    (folder / name).write_text("")
    with pytest.raises(DataError, match=rf"sum/{name}"):
        read(folder)


def test_links_and_missing_files(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum")
    (folder / "tests" / "more").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="tests/more is no regular file"):
        read(folder)
    (folder / "tests" / "more").unlink()
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match=r"tests/test\.sh"):
        read(folder)


def test_a_folder_is_a_prompt_file(tmp_path: Path) -> None:
    """One row a task, in their names' order; a slice; whose task has changed since is refused."""
    for name in ("b", "a", "c"):
        write_task(tmp_path / name)
    (tmp_path / "notes").mkdir()
    rows = open_rows(PromptWord(str(tmp_path), str(tmp_path)))
    assert isinstance(rows, TaskRows) and [Path(rows.where(i)).name for i in range(len(rows))] == ["a", "b", "c"]
    row = read_row(rows.where(0), rows[0], keys_in(rows, Keys(input="text", label="label")))
    assert row.text == "Write the sum of data/numbers.txt into sum.txt.\n" and task_of(row.metadata).name == "a"
    part = open_rows(read_word(f"{tmp_path}/@[1:]", "--prompt-data"))
    assert (len(part), part.where(0)) == (2, str(tmp_path / "b"))
    before = rows.sha256
    (tmp_path / "b" / "tests" / "test.sh").write_text("exit 1\n")
    assert TaskRows(tmp_path).sha256 != before
    with pytest.raises(DataError, match="b has changed"):
        rows[1]
    with pytest.raises(DataError, match="'harbor'"):
        task_of({})
    with pytest.raises(DataError, match="holds no tasks"):
        TaskRows(tmp_path / "a")


def test_words_of_folders() -> None:
    word = read_word("tasks/=2", "--prompt-data")
    assert (word.path, word.weight) == ("tasks/", 2.0)
    assert read_word("data=/tasks", "--prompt-data").path == "data=/tasks"
    assert read_word("a/b.jsonl@[:3]", "--prompt-data").path == "a/b.jsonl"
    with pytest.raises(UsageError, match="folder of tasks"):
        read_word("tasks@[:3]", "--prompt-data")


def test_tasks_are_looked_at_before_a_run(tmp_path: Path) -> None:
    """All of them, and whether anything works at them; the doctor says it too."""
    write_task(tmp_path / "a")
    given = {"prompt_data": str(tmp_path), "custom_generate_function_path": AGENT}
    look_at([Options(**given)])
    assert [finding.level for finding in findings([Options(**given)])] == ["ok"]
    with pytest.raises(UsageError, match="harbor_agent"):
        look_at([Options(prompt_data=str(tmp_path))])
    with pytest.raises(DataError, match="no labels"):
        look_at([Options(**given, rm_type="math", label_key="label")])
    write_task(tmp_path / "b", "[environment]\ngpus = 8\n")
    with pytest.raises(DataError, match=r"b/task\.toml: .*gpus"):
        look_at([Options(**given)])
    assert [finding.level for finding in findings([Options(**given)])] == ["fail"]


def test_a_run_leaves_tasks_their_time(tmp_path: Path) -> None:
    """The longest task's, of the slice alone; of a function of the user's nothing is known."""
    write_task(tmp_path / "a")
    write_task(tmp_path / "b", TOML.replace("timeout_sec = 10.0", "timeout_sec = 50.5"))
    given = {"prompt_data": str(tmp_path), "custom_generate_function_path": AGENT}
    refused = r"b/task\.toml may take 110\.5 s together, and a call may take 100 s; give --timeout-factor 0\.4;"
    with pytest.raises(UsageError, match=refused.replace(" b/", r" \S+/b/")):
        look_at([Options(**given, timeout_factor=1 / 3)])
    look_at([Options(**given, timeout_factor=0.4)])
    look_at([Options(**given | {"prompt_data": f"{tmp_path}/@[:1]"}, timeout_factor=1 / 3)])
    look_at([Options(**given | {"custom_generate_function_path": "own.generate"}, timeout_factor=1 / 3)])
    write_task(tmp_path / "c", TOML.replace("[verifier]\ntimeout_sec = 10.0\n[agent]\ntimeout_sec = 60.0\n", ""))
    with pytest.raises(UsageError, match="c/task.* 600 s.* 300 s"):
        look_at([Options(**given)])
