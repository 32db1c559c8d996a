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
from hpcrl.sandbox.harbor.images import read_images
from hpcrl.sandbox.harbor.rows import TaskRows, task_of
from hpcrl.sandbox.harbor.task import HarborTask, read_task, solution
from tests.support.harbor_tasks import DOCKERFILE, TOML, write_task

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
    assert (task.config.agent_seconds, task.config.verdict_seconds) == (60.0, 10.0)
    assert (task.config.limits.memory, task.config.limits.disk) == (256 << 20, 128 << 20)
    assert task.carried == ("/app", "/logs/artifacts")


def test_variables_and_artifacts(tmp_path: Path) -> None:
    toml = 'artifacts = ["out/log", {source = "/data"}]\n' + TOML
    toml = toml.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"\nenv = {A = "1"}')
    toml = toml.replace("[environment]", '[environment]\nenv = {B = "${HOME:-x}"}\nworkdir = "/srv/here"')
    task = read(write_task(tmp_path / "sum", toml, dockerfile=DOCKERFILE + "ENV C=two B=one\n"))
    assert task.env == {"C": "two", "B": "x"} and task.config.verdict_env == {"A": "1"}
    assert task.workdir == "/srv/here"
    assert task.carried == ("/logs/artifacts", "/srv/here/out/log", "/data")


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("network", "[environment]\nallow_internet = true"),
        ("network", '[agent]\nnetwork_mode = "public"'),
        ("network", '[environment]\nnetwork_mode = "open"'),
        ("allowed_hosts", '[environment]\nallowed_hosts = ["a.org"]'),
        ("network", '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]'),
        ("gpus", "[environment]\ngpus = 1"),
        ("tpu", '[environment]\ntpu = {type = "v6e", topology = "2x2"}'),
        ("mcp_servers", '[environment]\nmcp_servers = [{name = "a", url = "http://a"}]'),
        ("healthcheck", '[environment]\nhealthcheck = {command = "true"}'),
        ("os", '[environment]\nos = "windows"'),
        ("user", '[agent]\nuser = "agent"'),
        ("shared", '[verifier]\nenvironment_mode = "shared"'),
        ("environment", '[verifier]\nenvironment = {docker_image = "a"}'),
        ("collect", '[verifier]\ncollect = [{command = "true"}]'),
        ("SECRET", '[verifier]\nenv = {KEY = "${SECRET}"}'),
        ("steps", '[[steps]]\nname = "one"'),
        ("artifact", 'artifacts = ["/logs/verifier"]'),
        ("artifact", 'artifacts = ["../../usr/bin"]'),
        ("exclude", 'artifacts = [{source = "a", exclude = ["b"]}]'),
        ("working directory", '[environment]\nworkdir = "/usr/src"'),
        ("timeout_sec", "[agent]\ntimeout_sec = -1"),
        ("memory", '[environment]\nmemory = "2T"'),
        ("schema_version", 'schema_version = "2.0"'),
        ("later_key", "[agent]\nlater_key = 3"),
        ("cannot be read", "= 3"),
    ],
)
def test_what_a_task_must_not_ask_for(key: str, line: str, tmp_path: Path) -> None:
    """Each is one error, which names the task's file and the key."""
    with pytest.raises(DataError, match=rf"sum/task\.toml.*{key}"):
        read(write_task(tmp_path / "sum", line + "\n"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (2, "FROM debian:12\nRUN apt-get install -y \\\n  gcc\nCOPY a b"),
        (1, "FROM debian:12 AS build"),
        (3, "FROM debian:12\n# two\nFROM debian:13"),
        (2, "FROM debian:12\nCOPY --from=build /a /b"),
        (2, "FROM debian:12\nCOPY *.txt /app/"),
        (2, "FROM debian:12\nCOPY ../../etc /app"),
        (2, "FROM debian:12\nADD http://a/b /app"),
        (2, "FROM debian:12\nUSER agent"),
        (1, "ARG TAG=12\nFROM debian:$TAG"),
    ],
)
def test_what_needs_a_build(line: int, text: str, tmp_path: Path) -> None:
    """The error names the Dockerfile's line, and the image's place in images.toml; once it is there the task is read."""
    folder = write_task(tmp_path / "sum", dockerfile=text)
    with pytest.raises(DataError, match=rf'Dockerfile, line {line}: .*"sum" = "/path" in .*images\.toml'):
        read(folder)
    (tmp_path / "built").mkdir()
    (tmp_path / "images.toml").write_text('sum = "built"\n')
    task = read(folder)
    assert task.image == str(tmp_path / "built") and task.files == () and task.workdir == "/work"


def test_images(tmp_path: Path) -> None:
    """By the task's name too; docker_image without a Dockerfile gets the environment's files in its working directory."""
    folder = write_task(tmp_path / "one", dockerfile="RUN make\nFROM x\nWORKDIR /srv\n")
    (tmp_path / "images.toml").write_text('"tests/sum" = "system"\n"python:3" = "system"\n')
    assert (read(folder).image, read(folder).workdir) == ("system", "/srv")
    toml = TOML.replace("tests/sum", "tests/other").replace("[environment]", '[environment]\ndocker_image = "python:3"')
    other = write_task(tmp_path / "two", toml, dockerfile=None)
    with pytest.raises(DataError, match=r"two/task\.toml: the image python:3"):
        read(other)
    (tmp_path / "images.toml").write_text('"python:3" = "system"\n')
    assert [file.path for file in read(other).files] == ["/app/numbers.txt"]
    (tmp_path / "images.toml").write_text('"python:3" = "/not/here"\n')
    with pytest.raises(DataError, match=r"images\.toml: the image /not/here"):
        read(other)


def test_variables_of_a_dockerfile(tmp_path: Path) -> None:
    """They are read alike, whether the image has to be built or not; what the image alone knows is the task's to say."""
    folder = write_task(
        tmp_path / "sum", dockerfile=DOCKERFILE + "ENV A=/a\nENV PATH=$A:$PATH B=${A}/b\nENV C two words\n"
    )
    env = read(folder).env
    assert (env["A"], env["B"], env["C"], env["PATH"][:8]) == ("/a", "/a/b", "two words", "/a:/usr/")
    for line in ("ENV D=$E", "ENV D", "ENV =d"):
        (folder / "environment" / "Dockerfile").write_text(f"{DOCKERFILE}{line}\n")
        with pytest.raises(DataError, match="Dockerfile, line 4: ENV "):
            read(folder)


def test_what_a_built_image_sets(tmp_path: Path) -> None:
    """No file of the image holds it: the working directory and the variables of the Dockerfile's last stage."""
    text = (
        "FROM a AS base\nWORKDIR /srv\nENV TREE=/opt/tree LEVEL=2\nFROM b AS other\nENV LEVEL=9\n"
        "FROM --platform=linux/amd64 base\nRUN make\nWORKDIR sub\nENV TREE=/new PATH=$TREE/bin:${PATH} \\\n  EMPTY=\nENV SAID two words\n"
    )
    folder = write_task(tmp_path / "one", dockerfile=text)
    (tmp_path / "images.toml").write_text('one = "system"\n')
    task = read(folder)
    assert task.workdir == "/srv/sub"
    assert task.env == {
        "TREE": "/new",
        "LEVEL": "2",
        "PATH": "/opt/tree/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "EMPTY": "",
        "SAID": "two words",
    }
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(text.replace("LEVEL=2", "LEVEL=3"))
    assert read(folder).digest != task.digest
    dockerfile.write_text(text.replace("WORKDIR sub", "WORKDIR other"))
    assert read(folder).digest != task.digest
    dockerfile.write_text(text + "ENV LIBRARY=/x:$LIBRARY\n")
    with pytest.raises(DataError, match=r"Dockerfile, line 12: ENV LIBRARY .*\[environment\] env"):
        read(folder)
    write_task(folder, TOML + '[environment.env]\nLIBRARY = "/x"\n', dockerfile=dockerfile.read_text())
    (tmp_path / "images.toml").write_text('one = "system"\n')
    assert read(folder).env["LIBRARY"] == "/x"


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "steps", "trajectory.json", "tests/.harborignore"])
def test_files_that_are_not_read(name: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum")
    (folder / name).write_text("")
    with pytest.raises(DataError, match=rf"sum/{name}"):
        read(folder)


def test_an_image_of_the_verifiers_own(tmp_path: Path) -> None:
    """Harbor reads its Dockerfile for a separate verifier alone, and it is refused for that alone."""
    folder = write_task(tmp_path / "sum")
    (folder / "tests" / "Dockerfile").write_text("FROM debian:12\n")
    assert len(read(folder).tests) == 2
    (folder / "task.toml").write_text(TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"'))
    with pytest.raises(DataError, match="tests/Dockerfile"):
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
    assert (len(part), part.line(0), part.where(0)) == (2, 2, str(tmp_path / "b"))
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
    write_task(tmp_path / "c", TOML.split("[verifier]")[0])
    with pytest.raises(UsageError, match="c/task.* 600 s.* 300 s"):
        look_at([Options(**given)])
