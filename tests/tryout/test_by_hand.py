"""hpcrl try, chat and serve with a real engine: it is started once, used again, and ends by itself."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from hpcrl.engines.http import Address
from hpcrl.errors import HpcrlError
from hpcrl.tryout import kept_engine
from hpcrl.tryout.conversation import Chat
from hpcrl.tryout.kept_engine import at_hand
from hpcrl.tryout.target import of_model
from tests.support.children import read_line
from tests.support.quick_start import QuickStart
from tests.support.screens import ctrl_c

pytestmark = pytest.mark.vllm
HPCRL = Path(sys.executable).with_name("hpcrl")
SECONDS = 200


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Iterator[Path]:
    """A folder of a user's: a recipe that starts from the quick start's model, and a home of its own; what is kept up ends
    with the tests."""
    folder = tmp_path_factory.mktemp("try")
    (folder / "reward.py").write_text(
        "def parts(options, sample):\n    return {'score': len(sample.response), 'own': 0.25}\n"
    )
    (folder / "recipe.toml").write_text(
        f'hf_checkpoint = "{task / "model"}"\nprompt_data = "{task / "train.jsonl"}"\ninput_key = "prompt"\n'
        'label_key = "label"\napply_chat_template = true\nbf16 = false\nactor_num_gpus_per_node = 1\nnum_rollout = 1\n'
        "rollout_num_gpus = 1\nn_samples_per_prompt = 8\nrollout_max_response_len = 8\nrollout_max_context_len = 64\n"
        'custom_rm_path = "{recipe}/reward.py:parts"\nreward_key = "score"\n'
    )
    yield folder
    for used in (folder / "state").rglob("used"):
        used.unlink()  # ends the engine
    deadline = time.monotonic() + 60
    while engines(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not engines(folder)


def engines(folder: Path) -> list[int]:
    """Processes that were started with something below the folder's state."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder / "state") in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(folder / "state")}


def typed(folder: Path, *words: str, lines: str = "") -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command."""
    done = subprocess.run(
        [str(HPCRL), *words], cwd=folder, env=environment(folder), input=lines, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_recipe_is_tried_twice_with_one_engine(place: Path) -> None:
    """Prompts token by token, responses with the reward and its parts; the second time the engine is there."""
    status, first, said = typed(place, "try", "recipe.toml", "--prompts", "2")
    assert status == 0 and "starting an engine" in said, said
    assert len(re.findall(r"^prompt \d+: \S*train\.jsonl, line \d+, \d+ tokens$", first, re.MULTILINE)) == 2
    assert len(re.findall(r"^  response \d+: \d+ tokens, \w+, .*reward \d+ \(.*own 0\.25", first, re.MULTILINE)) == 4
    assert re.search(r"<\|user\|>\|\d\|\+\|\d", first), first
    status, second, said = typed(place, "try", "recipe.toml", "--prompts", "1", "--responses", "3")
    assert status == 0 and "starting" not in said, said
    assert second.count("response ") == 3
    shown = first.splitlines()[1:3]
    assert shown == second.splitlines()[1:3], "the same prompt comes first"


def test_ctrl_c_leaves_the_engine_alone(place: Path) -> None:
    """At a terminal, while it samples: 130, no traceback of the sampling process, which is gone; the engine serves the
    next try."""
    status, text = ctrl_c([str(HPCRL), "try", "recipe.toml"], ["recipe.toml: "], place, environment(place))
    assert status == 130 and "Traceback" not in text and "engine stays up" in text, text
    assert not [line for line in _commands() if "one_try" in line and str(place) in line]
    status, _, said = typed(place, "try", "recipe.toml", "--prompts", "1")
    assert status == 0 and "starting" not in said, said


def _commands() -> list[str]:
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def test_a_reward_that_raises_is_shown(place: Path) -> None:
    (place / "wrong.py").write_text("def parts(options, sample):\n    return sample.lable\n")
    words = ("--custom-rm-path", "./wrong.py:parts", "--prompts", "6", "--responses", "1")
    status, out, err = typed(place, "try", "recipe.toml", *words)
    assert status == 0 and len(re.findall("not graded .*lable", out)) == 6, out + err


def test_an_agents_reward_of_nothing_is_shown(place: Path) -> None:
    """0 is what it gave, and not that it gave none."""
    (place / "agent.py").write_text(
        "from hpcrl.rollout.samplers.conversation import Conversation\n\n\n"
        "async def generate(args, sample, sampling_params):\n    talk = Conversation(args, sample, sampling_params)\n"
        "    await talk.turn()\n    found = talk.sample()\n    found.reward = 0.0\n    return found\n"
    )
    graded, _, _ = (place / "recipe.toml").read_text().partition("custom_rm_path")
    (place / "agent.toml").write_text(f'{graded}custom_generate_function_path = "{{recipe}}/agent.py:generate"\n')
    status, out, err = typed(place, "try", "agent.toml", "--prompts", "1", "--responses", "1")
    assert status == 0 and re.search(r"response 1: .*; reward 0$", out, re.MULTILINE), out + err


def test_a_conversation_and_its_engine(place: Path, task: Path) -> None:
    """Each line is a turn, and /new begins again."""
    words = ("chat", str(task / "model"), "--no-bf16", "--temperature", "0", "--max-tokens", "6")
    status, out, err = typed(place, *words, lines="1+2=\n1+2=\n/new\n1+2=\n")
    answers = out.splitlines()
    assert status == 0 and len(answers) == 3, out + err
    assert answers[0] == answers[2]


def test_a_checkpoint_of_a_run_is_converted_once(
    place: Path, quick_start: QuickStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings that the run's engines had."""
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    found = of_model(str(quick_start.root), {})
    model = Path(found.options.hf_checkpoint or "")
    assert re.fullmatch(r"iter_\d{7}-[0-9a-f]{12}", model.name) and model.name.partition("-")[0] in found.said
    assert list(model.glob("*.safetensors")) and found.options.bf16 is False
    (model / "mark").touch()
    assert of_model(str(quick_start.root), {}).options.hf_checkpoint == str(model) and (model / "mark").exists()


def test_a_server_asks_for_its_key(place: Path, task: Path) -> None:
    """What is printed is all that is needed; SIGTERM leaves nothing."""
    command = [str(HPCRL), "serve", str(task / "model"), "--no-bf16"]
    server = subprocess.Popen(command, cwd=place, env=environment(place), stdout=subprocess.PIPE, text=True)
    try:
        while not (line := read_line(server, 240)).startswith("export"):
            assert line, "the server has ended"
        url = re.search(r"OPENAI_BASE_URL=(\S+)", line)
        key = re.search(r"\$\(cat (\S+)\)", line)
        assert url and key and Path(key[1]).stat().st_mode & 0o777 == 0o600
        word = Path(key[1]).read_text()
        assert [asked(f"{url[1]}/models", one) for one in ("", word)] == [401, 200]
        assert asked(url[1].removesuffix("/v1") + "/pause", word) == 401, "this key opens OpenAI's routes alone"
        said_and_remembered(url[1], word)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert not [pid for pid in engines(place) if "serve-keys" in " ".join(psutil.Process(pid).cmdline())]


def said_and_remembered(url: str, key: str) -> None:
    """Two turns, of which the second brings the first; then nothing."""
    where = urlsplit(url)
    address = Address(where.hostname or "", where.port or 0, key)
    chat = Chat({"temperature": 0, "max_tokens": 4}, "be brief")
    first, second = ("".join(chat.say(text, address)) for text in ("1+2=", "3+4="))
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [chat.messages[at]["content"] for at in (2, 4)] == [first, second] and first
    chat.forget()
    assert [one["role"] for one in chat.messages] == ["system"]


def asked(url: str, key: str) -> int:
    """The status of a request."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 0, timeout=60)
    try:
        connection.request("GET", where.path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_an_engine_that_cannot_start_says_why(
    place: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own last word, and the log that has more; nothing stays up."""
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    model = shutil.copytree(task / "model", tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    target = of_model(str(model), {"bf16": False})
    with pytest.raises(HpcrlError, match=r"has ended: .*; see \S+/log"):
        at_hand(target.options, target.folder)
    assert not [pid for pid in engines(place) if str(target.folder) in " ".join(psutil.Process(pid).cmdline())]


def test_an_unused_engine_ends_by_itself(place: Path) -> None:
    """The one of `hpcrl try`, once its last use is long ago; the next try starts another."""
    (used,) = [path for path in (place / "state").rglob("used") if "recipe-" in str(path)]
    mine = [pid for pid in engines(place) if str(used.parent) in " ".join(psutil.Process(pid).cmdline())]
    assert mine
    long_ago = time.time() - kept_engine.IDLE - 60
    os.utime(used, (long_ago, long_ago))
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in mine) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not any(psutil.pid_exists(pid) for pid in mine)
