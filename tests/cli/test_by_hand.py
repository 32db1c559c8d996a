"""hpcrl try with a real engine, which ends with the command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.utils.waiting import Deadline, poll
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
    assert not engines(folder)


def engines(folder: Path) -> list[str]:
    """Processes of engines, and of what samples, that were started for something below the folder."""
    found = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    temporary = str(folder / "tmp")
    return [line for line in found if temporary in line and ("hpcrl.engine" in line or "try_samples" in line)]


def environment(folder: Path) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return os.environ | {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "tmp")}


def typed(folder: Path, *words: str, lines: str = "") -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command."""
    done = subprocess.run(
        [str(HPCRL), *words], cwd=folder, env=environment(folder), input=lines, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_prompts_responses_and_rewards_are_shown(place: Path) -> None:
    """Prompts token by token, responses with the reward and its parts; then nothing is left but the engine's log."""
    status, shown, said = typed(place, "try", "recipe.toml", "--prompts", "2")
    assert status == 0 and "starting an engine" in said, said
    assert len(re.findall(r"^prompt \d+: \S*train\.jsonl, line \d+, \d+ tokens$", shown, re.MULTILINE)) == 2
    assert len(re.findall(r"^  response \d+: \d+ tokens, \w+, .*reward \d+ \(.*own 0\.25", shown, re.MULTILINE)) == 4
    assert re.search(r"<\|user\|>\|\d\|\+\|\d", shown), shown
    assert not engines(place) and not list((place / "tmp").glob("hpcrl-[te]*-*"))


def test_ctrl_c_ends_the_engine(place: Path) -> None:
    """At a terminal, while it starts: 130, and no traceback of any process."""
    status, text = ctrl_c([str(HPCRL), "try", "recipe.toml"], ["starting an engine"], place, environment(place))
    assert status == 130 and "Traceback" not in text and "interrupted" in text, text
    assert not engines(place)


def test_an_engine_ends_with_a_killed_command(place: Path) -> None:
    """However the command ends: the kernel tells its children."""
    command = [str(HPCRL), "try", "recipe.toml", "--prompts", "1"]
    process = subprocess.Popen(command, cwd=place, env=environment(place), stdout=subprocess.PIPE)
    try:
        assert poll(lambda: any("hpcrl.engine.server" in line for line in engines(place)), Deadline(SECONDS), 0.1)
    finally:
        process.kill()
        process.wait()
    assert poll(lambda: not engines(place), Deadline(30), 0.1)


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


def test_an_engine_that_cannot_start_says_why(place: Path, task: Path, tmp_path: Path) -> None:
    """Its own last word, and the log that has more; nothing stays up."""
    model = shutil.copytree(task / "model", tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    status, _, err = typed(place, "try", "recipe.toml", "--hf-checkpoint", str(model))
    assert status == 1 and re.search(r"the engine ended: .*; see \S+log$", err, re.MULTILINE), err
    assert not engines(place)
