"""Launchers written in Python: what they would have passed to train.py, and nothing that they start is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.cli.import_script import translated, with_environment
from hpcrl.cli.main import main
from hpcrl.errors import UsageError
from hpcrl.sandbox import Unconfined, slime_script
from hpcrl.sandbox.slime_script import RunScript, interpreter_files, run_script
from tests.support.able import needs
from tests.support.queues import until

pytestmark = needs("namespaces")  # a script is run confined
HELPER = "import slime.utils.external_utils.command_utils as U\n"
CALL = (
    "U.execute_train(train_args='--hf-checkpoint /m --num-rollout 1', num_gpus_per_node=8, megatron_model_type=None)\n"
)
GIVEN = ("--hf-checkpoint", "/m", "--num-rollout", "1")
DATACLASS = """
from __future__ import annotations
import os
from dataclasses import dataclass
from typing import Literal
import typer
import torch
from slime.utils.external_utils import command_utils as U
from slime.utils.misc import exec_command

@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_name: str = "Qwen3-4B"
    hardware: Literal["H100", "GB200"] = "H100"
    steps: int = 3
    evaluate: bool = False

def execute(args):
    more = "--skip-eval-before-train " if args.evaluate else ""
    U.execute_train(
        train_args=f"--hf-checkpoint /m/{args.model_name} --num-rollout {args.steps} {more}",
        num_gpus_per_node=U.NUM_GPUS_OF_HARDWARE[args.hardware],
        megatron_model_type="qwen3-4B",
        config=args,
        extra_env_vars={"MINE": "1", "PYTHONPATH": "/root/Megatron-LM"},
        train_script="train_async.py",
    )

@U.dataclass_cli
def main(args: ScriptArgs):
    exec_command("hf download Qwen/Qwen3-4B --local-dir /root/models/Qwen3-4B")
    execute(args)

if __name__ == "__main__":
    typer.run(main)
"""


def launched(path: Path, text: str, words: str = "", seconds: float = 20.0, **variables: str) -> RunScript:
    file = path / "run_x.py"
    file.write_text(text)
    return run_script(file, variables, seconds=seconds, words=words.split())


def test_settings_are_a_dataclass(tmp_path: Path) -> None:
    found = launched(tmp_path, DATACLASS)
    assert found.program == "train_async.py"
    assert found.arguments == ("--hf-checkpoint", "/m/Qwen3-4B", "--num-rollout", "3")
    assert found.environment == {"MINE": "1"}, "PYTHONPATH is needless"
    assert any("hf download" in note and "before a run" in note for note in found.notes)
    assert any("qwen3-4B is a qwen3 model" in note for note in found.notes)
    given = launched(tmp_path, DATACLASS, "--evaluate", steps="7", SLIME_SCRIPT_MODEL_NAME="Qwen3-8B").arguments
    assert given == ("--hf-checkpoint", "/m/Qwen3-8B", "--num-rollout", "7", "--skip-eval-before-train")
    for words, told in (("--stepz 3", "No such option: --stepz"), ("--steps x", "Invalid value for '--steps'")):
        with pytest.raises(UsageError, match=f"{told}.* -- is its own"):
            launched(tmp_path, DATACLASS, words)


@pytest.mark.parametrize(
    "text",
    [
        HELPER + CALL,
        "from slime.utils.external_utils.command_utils import execute_train\n" + CALL.removeprefix("U."),
        "import subprocess\nsubprocess.run(['ray', 'job', 'submit', '--', 'python3', 'train.py', "
        f"*{GIVEN!r}], check=True)\n",
        "import os\nos.system('python3 train.py --hf-checkpoint /m --num-rollout 1')\n",
        "import subprocess\nwith subprocess.Popen('python3 train.py --hf-checkpoint /m --num-rollout 1', shell=True) as p:"
        "\n    p.wait()\n",
        f"{HELPER}U.exec_command('export A=1 && ray job submit -- python3 train.py {' '.join(GIVEN)}')\n",
        f"{HELPER}import numpy, torch.distributed as dist\nfrom transformers import AutoConfig\n"
        f"n = U.exec_command('nvidia-smi -L | wc -l', capture_output=True)\nassert int(n) == 0\n{CALL}",
        f"{HELPER}import os\nfor name in ('http_proxy', 'HTTPS_PROXY'):\n    os.environ.pop(name)\n{CALL}",
        f"{HELPER}{CALL}raise AssertionError('what slime looks at after the run')\n",
        f"{HELPER}import argparse\np = argparse.ArgumentParser()\np.add_argument('--steps', type=int, required=True)\n"
        f"assert p.parse_args().steps == 4\n{CALL}",
        f"{HELPER}import typer\napp = typer.Typer()\n@app.command()\ndef go(steps: int = typer.Option(3)):\n"
        f"    assert steps == 4\n    {CALL}app()\n",
        f"{HELPER}U.rsync_simple(path_src='/a', path_dst='/b')\nU.hf_download_dataset(full_name='a/b')\n{CALL}",
        f"{HELPER}import pytest\n@pytest.mark.parametrize('n', [1])\ndef test(n):\n    pass\n{CALL}",
        f"{HELPER}def server():\n    raise SystemExit('no server here')\n"
        + CALL.replace("=None)", "=None, before_ray_job_submit=server)"),
    ],
)
def test_forms_of_a_start(text: str, tmp_path: Path) -> None:
    """However a launcher starts train.py, its arguments are what train.py would have got."""
    assert launched(tmp_path, text, "--steps=4" if "steps" in text else "").arguments == GIVEN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HELPER + "import os\nos.environ['BASE_DIR']\n", "KeyError: 'BASE_DIR'; write BASE_DIR=VALUE after the script"),
        (HELPER + "import typer\ndef go(*, steps: int):\n    pass\ntyper.run(go)\n", "Missing .*-- is its own command"),
        (HELPER + "import not_there\n", "at line 2: ModuleNotFoundError: No module named 'not_there'; install"),
        (HELPER + "U.of_another_version()\n", r"at line 2: NotHere: slime\.\S+command_utils\.of_another_version is not"),
        (HELPER + "from slime.utils.misc import other\nif other:\n    pass\n", "at line 3: NotHere: slime.utils.misc.other"),
        ("import torch\nn = torch.cuda.device_count() or 8\n" + HELPER + CALL, "at line 2: NotHere: torch.cuda is not"),
        (
            "from torch import version\ntry:\n    a = f'{version}'\nexcept Exception:\n    a = ''\n" + HELPER + CALL,
            "at line 3: NotHere: torch.version is not",
        ),
        (HELPER + "import time\nwhile True:\n    time.sleep(9)\n", "it waits without end"),
        (HELPER + "while True:\n    pass\n", "had not ended after 3 s"),
        ("print('hello')\n", "starts neither train.py nor train_async.py"),
        (HELPER + "U.execute_train(\n", "SyntaxError: '(' was never closed"),
        (HELPER + "import socket\nsocket.create_connection(('127.0.0.1', 22))\n", "(OSError|Error): .*"),
        (HELPER + "open('/etc/shadow')\n", "FileNotFoundError"),
    ],
)  # fmt: skip
def test_why_a_launcher_comes_to_nothing(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        launched(tmp_path, text, seconds=3.0 if "pass\n" in text and "while" in text else 20.0)
    assert told in str(error.value) or re.search(told, str(error.value)), error.value


def test_nothing_that_it_starts_is_started(tmp_path: Path) -> None:
    """A command of a launcher's leaves no trace outside, and none of the tools that it names runs."""
    text = f"""{HELPER}import os, subprocess
subprocess.run(["touch", "{tmp_path}/made"])
os.system("python3 -c 'open(\\"{tmp_path}/made2\\", \\"w\\")'")
try:
    open("{tmp_path}/made3", "w")
except OSError:
    pass
{CALL}"""
    found = launched(tmp_path, text)
    assert found.arguments == GIVEN and [file.name for file in tmp_path.iterdir()] == ["run_x.py"]
    assert any(note.startswith("touch") for note in found.notes)


ROLES = "megatron:\\n  - {role: critic, overrides: {lr: 1e-5}}\\n  - {role: actor, overrides: {lr: 1e-6}}\\n"


def test_files_that_it_writes_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of settings that the launcher writes itself becomes options; one that the run would read is named."""
    text = f"""{HELPER}import tempfile, yaml
roles = U.save_to_temp_file("{ROLES}", "yaml")
own = tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False)
with own:
    yaml.safe_dump({{"turns": 4}}, own)
U.execute_train(
    train_args=f"--hf-checkpoint /m --num-rollout 1 --lr 1e-6 --advantage-estimator ppo --megatron-config-path {{roles}} "
    f"--custom-config-path {{own.name}} --custom-generate-function-path mine.turns",
    num_gpus_per_node=8,
    megatron_model_type=None,
)
"""
    file = tmp_path / "run_x.py"
    file.write_text(text)
    assert main(["import", str(file)]) == 2, "the run would not find it"
    said = capsys.readouterr()
    assert "critic_lr = 1e-05" in said.out and "megatron_config_path" not in said.out
    [name] = re.findall(r'custom_config_path = "(/tmp/\w+\.yaml)"', said.out)
    assert f"{name}: the launcher writes" in said.err and "hpcrl-import-" not in said.out + said.err


@pytest.mark.parametrize(
    "text",
    [
        f"import os\nos.environ.get('A_NAME')\n{HELPER}{CALL}",
        HELPER + CALL.replace("/m ", "$A_NAME "),
        f"import os\nenv = {{**os.environ}}\n{HELPER}{CALL}",
        f"import os\n'A_NAME' in os.environ\n{HELPER}{CALL}",
    ],
)
def test_variables_that_are_read(text: str, tmp_path: Path) -> None:
    assert launched(tmp_path, text, A_NAME="/m").arguments == GIVEN


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run(['bash', here + '/x.sh'], env={**os.environ, 'LR': '5', 'PATH': '/nowhere'}, check=True)",
        "subprocess.check_call('bash x.sh', shell=True, cwd=here, env={'LR': '5'})",
        "subprocess.run(['bash'], input=f'LR=5\\nsource {here}/x.sh', text=True)",
        "subprocess.Popen(['bash'], stdin=subprocess.PIPE).communicate(f'LR=5\\nsource {here}/x.sh'.encode())",
    ],
)
def test_what_a_command_is_given(start: str, tmp_path: Path) -> None:
    """A command's own variables, directory and input reach it, and the sandbox's tools stay its own."""
    (tmp_path / "x.sh").write_text("python3 train.py --hf-checkpoint /m --lr $LR\n")
    text = f"import os, subprocess\nhere = os.path.dirname(__file__)\nos.chdir('/')\n{start}\n"
    assert launched(tmp_path, text).arguments == ("--hf-checkpoint", "/m", "--lr", "5")


def test_files_of_its_own_alone_are_handed_over(tmp_path: Path) -> None:
    """A file is the launcher's own wherever its path stands in a flag; what lies next to the launcher is not."""
    (tmp_path / "y.yaml").write_text("near\n")
    text = f"""{HELPER}import os
place = U.save_to_temp_file("written", "yaml")
U.exec_command(f"python3 train.py --a={{place}} --b {{os.path.dirname(__file__)}}/y.yaml")
"""
    found = launched(tmp_path, text)
    assert list(found.files.values()) == ["written"] and [found.arguments[0]] == [f"--a={next(iter(found.files))}"]


def test_a_written_file_after_an_equals_sign(tmp_path: Path) -> None:
    script = RunScript("train.py", ("--megatron-config-path=/tmp/x.yaml",), {}, (), {"/tmp/x.yaml": "megatron: []"})
    [line] = [line for line in translated(script)[0].lines if line.flag == "megatron-config-path"]
    assert line.reading.outcome == "needless" and line.given == "--megatron-config-path /tmp/x.yaml"


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (["--train-env-vars", '{"A": "1"}'], {"A": "1", "B": "2"}),
        (['--train-env-vars={"B": "3"}'], {"B": "3"}),
        (["--train_env_vars", '{"A": "1"}'], {"A": "1", "B": "2"}),
        ([], {"B": "2"}),
    ],
)
def test_variables_of_both_places_are_merged(own: list[str], merged: dict[str, str]) -> None:
    """What --runtime-env-json sets is not lost where the script sets others itself, which win."""
    script = RunScript("train.py", ("--lr", "1e-6", *own, "--use-tis"), {"B": "2"}, ())
    assert with_environment(script)[:3] == ["--lr", "1e-6", "--use-tis"]
    assert translated(script)[0].values["train_env_vars"] == merged


def test_variables_that_are_no_json_are_refused() -> None:
    script = RunScript("train.py", ("--train-env-vars", "{A"), {"B": "2"}, ())
    assert [error for error in translated(script)[0].wrong if "train-env-vars" in str(error)]


def test_of_a_python_at_home_little_is_shown(tmp_path: Path) -> None:
    """The interpreter, its libraries and its standard library are shown, never all that lies where it is."""
    for name in ("bin/python3", "lib/libpython3.11.so.1.0", "lib/libz.so.1", "lib/python3.11/os.py", "secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shown = interpreter_files(f"{tmp_path}/bin/python3", f"{tmp_path}/lib/python3.11", str(tmp_path))
    names = ("bin/python3", "lib/python3.11", "lib/libpython3.11.so.1.0", "lib/libz.so.1")
    assert shown == [f"{tmp_path}/{name}" for name in names]
    for home in (tmp_path / "lib", tmp_path / "lib/me"):
        with pytest.raises(UsageError, match="holds your home"):
            interpreter_files(f"{tmp_path}/bin/python3", f"{tmp_path}/lib", str(home))


def test_its_own_helpers_are_imported(tmp_path: Path) -> None:
    """A module next to the launcher is the real one."""
    (tmp_path / "sizes.py").write_text("STEPS = 1\n")
    assert launched(tmp_path, f"from sizes import STEPS\n{HELPER}assert STEPS == 1\n{CALL}").arguments == GIVEN


@pytest.fixture
def unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where users may make no namespaces."""

    def refuse(*_: object) -> None:
        raise Unconfined("no namespaces")

    monkeypatch.setattr(slime_script, "run_confined", refuse)


@pytest.mark.parametrize("name", ["run_x.py", "run-x.sh"])
@pytest.mark.usefixtures("unconfined")
def test_a_trusted_script_without_a_sandbox(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused unless it is trusted; then, too, what it would start is noted down, and nothing is removed."""
    (tmp_path / "kept").write_text("")
    start = f"rm -rf {tmp_path}/kept; ray stop; sleep 99; /usr/bin/python3 train.py {' '.join(GIVEN)}"
    file = tmp_path / name
    file.write_text(f"import os\nos.system('{start}')\n" if name.endswith(".py") else start)
    assert main(["import", str(file)]) == 2
    said = capsys.readouterr()
    assert "no namespaces;" in said.err and "with --trust-script" in said.err and not said.out
    main(["import", str(file), "--trust-script"])
    said = capsys.readouterr()
    assert 'hf_checkpoint = "/m"' in said.out and "ray stop: " in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", name]


@pytest.mark.usefixtures("unconfined")
def test_a_trusted_script_is_ended(tmp_path: Path) -> None:
    """With what it has left in the background, when its time is over or it ends."""
    file = tmp_path / "run-x.sh"
    file.write_text(f"python3 train.py {' '.join(GIVEN)}\n(while :; do :; done) &\necho $! > pid\n")
    assert run_script(file, {}, trusted=True).arguments == GIVEN
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    until(lambda: not left.exists() or not left.read_bytes())  # one that has ended has none
    file.write_text("while :; do :; done")
    with pytest.raises(UsageError, match="had not ended after 1 s"):
        run_script(file, {}, seconds=1.0, trusted=True)
