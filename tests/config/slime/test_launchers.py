"""Launchers written in Python: what they would have passed to train.py, and nothing that they start is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.cli.import_script import translated, with_environment
from hpcrl.cli.main import main
from hpcrl.errors import UsageError
from hpcrl.sandbox.slime_script import RunScript, interpreter_files, run_script
from tests.support.able import needs

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


def launched(path: Path, text: str, seconds: float = 20.0, **variables: str) -> RunScript:
    file = path / "run_x.py"
    file.write_text(text)
    return run_script(file, variables, seconds=seconds)


def test_settings_are_a_dataclass(tmp_path: Path) -> None:
    found = launched(tmp_path, DATACLASS)
    assert found.program == "train_async.py"
    assert found.arguments == ("--hf-checkpoint", "/m/Qwen3-4B", "--num-rollout", "3")
    assert found.environment == {"MINE": "1"}, "PYTHONPATH is needless"
    assert any("hf download" in note and "before a run" in note for note in found.notes)
    assert any("qwen3-4B is a qwen3 model" in note for note in found.notes)
    given = launched(tmp_path, DATACLASS, steps="7", evaluate="true", model_name="Qwen3-8B").arguments
    assert given == ("--hf-checkpoint", "/m/Qwen3-8B", "--num-rollout", "7", "--skip-eval-before-train")


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
        f"{HELPER}import numpy, requests\nassert numpy.zeros(3) is not None\n"
        f"n = U.exec_command('nvidia-smi -L | wc -l', capture_output=True)\nassert int(n) == 0\n{CALL}",
        f"{HELPER}import os\nfor name in ('http_proxy', 'HTTPS_PROXY'):\n    os.environ.pop(name)\n{CALL}",
        f"{HELPER}{CALL}raise AssertionError('what slime looks at after the run')\n",
        f"{HELPER}import argparse\np = argparse.ArgumentParser()\np.add_argument('--steps', type=int, required=True)\n"
        "p.add_argument('--fast', action='store_true')\na = p.parse_args()\nassert a.steps == 4 and a.fast\n" + CALL,
        f"{HELPER}import typer\napp = typer.Typer()\n@app.command()\ndef go(steps: int = typer.Option(3)):\n"
        f"    assert steps == 4\n    {CALL}app()\n",
        f"{HELPER}import tyro\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    steps: int = 3\n"
        f"a = tyro.cli(A)\nassert a.steps == 4 and str(U.repo_base_dir) == '/root/slime'\n{CALL}",
        f"{HELPER}U.rsync_simple(path_src='/a', path_dst='/b')\nU.hf_download_dataset(full_name='a/b')\n{CALL}",
        f"{HELPER}import fire\ndef go(steps: int = 3):\n    assert steps == 4\n    {CALL}fire.Fire(go)\n",
        f"{HELPER}import pytest\n@pytest.mark.parametrize('n', [1])\ndef test(n):\n    pass\n{CALL}",
        f"{HELPER}def server():\n    raise SystemExit('no server here')\n"
        + CALL.replace("=None)", "=None, before_ray_job_submit=server)"),
    ],
)
def test_forms_of_a_start(text: str, tmp_path: Path) -> None:
    """However a launcher starts train.py, its arguments are what train.py would have got."""
    given = {name: value for name, value in {"steps": "4", "fast": "1"}.items() if name in text}
    assert launched(tmp_path, text, **given).arguments == GIVEN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HELPER + "import os\nos.environ['BASE_DIR']\n", "KeyError: 'BASE_DIR'; write BASE_DIR=VALUE after the script"),
        (HELPER + "import typer\ndef go(steps: int):\n    pass\ntyper.run(go)\n", "write steps=VALUE after the"),
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


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CALL.replace("rollout 1'", "rollout ' + str(torch.cuda.device_count())"), "--num-rollout UNKNOWN:torch.cuda"),
        (CALL.replace("rollout 1'", "rollout ' + f'{8 // torch.size - 1:d}'"), "--num-rollout UNKNOWN:torch.size"),
        (CALL.replace("rollout 1'", "rollout ' + torch.size"), "UNKNOWN:torch.size"),
        (CALL.replace("/m ", "/m/{torch.version} ").replace("='--hf", "=f'--hf"), "--hf-checkpoint UNKNOWN:torch.v"),
        (CALL.replace("'--hf", "f'--save={torch.a!s} --hf"), "--save UNKNOWN:torch.a"),
        (CALL.replace("gpus", "gpus").replace("=8,", "=8, extra_env_vars={'A': torch.a},"), "environment A UNKNOWN:"),
        (
            f"p = U.save_to_temp_file(f'a: {{torch.a}}', 'yaml')\n{CALL}".replace("'--hf", "f'--x {p} --hf"),
            "the file /",
        ),
    ],
)
def test_what_only_a_package_knows_is_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of a package that is not there is an error that names the flag, or what else would have had it, and no
    recipe is written."""
    file = tmp_path / "run_x.py"
    file.write_text(HELPER + "import torch\n" + text)
    assert main(["import", str(file)]) == 2
    said = capsys.readouterr()
    assert told in said.err and not said.out and said.err.count("hpcrl: error") == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("if torch.cuda.is_available():\n    pass\n", "line 3 depends on torch.cuda.is_available"),
        ("more = '--a' if torch.mode == 'tis' else ''\n", "line 3 depends on torch.mode"),
        ("for _ in torch.settings:\n    pass\n", "line 3 depends on torch.settings"),
        ("a = 1\nb = len(torch.names)\n", "line 4 depends on torch.names"),
        ("a = torch.lr or 1e-6\n", "line 3 depends on torch.lr"),
        ("a = 'b' in torch.names\n", "line 3 depends on torch.names"),
        ("a = {1: 2}.get(torch.cuda.device_count(), 3)\n", "line 3 depends on torch.cuda.device_count"),
        ("try:\n    a = int(torch.size)\nexcept TypeError:\n    a = 8\n", "line 4 depends on torch.size"),
        ("import os\na = os.path.exists(torch.place)\n", "line 4 depends on torch.place"),
        ("a = U.of_another_version()\n", "line 3 depends on slime.utils.external_utils.command_utils.of_another"),
        ("from vime.utils.external_utils import command_utils as V\nV.other\n", "line 4 depends on vime"),
        ("a = '--a' if torch.mode is None else ''\n", "line 3 depends on torch.mode"),
        ("if not torch.mode is not None:\n    pass\n", "line 3 depends on torch.mode"),
        ("a = 1\nif isinstance(torch.lr, float):\n    pass\n", "line 4 depends on torch.lr"),
        ("a = isinstance(1, (int, torch.Tensor))\n", "line 3 depends on torch.Tensor"),
    ],
)
def test_what_depends_on_a_package_is_refused(text: str, told: str, tmp_path: Path) -> None:
    """A flag may be missing where a branch, a loop or a look-up went by a value that nobody knew."""
    with pytest.raises(UsageError) as error:
        launched(tmp_path, f"{HELPER}import torch\n{text}{CALL}")
    assert told in str(error.value)


def test_what_cannot_reach_the_arguments_is_let_be(tmp_path: Path) -> None:
    """Calls of a package, signatures of its types, and branches after the start, are none of that."""
    text = f"""{HELPER}import torch, wandb
from typing import Optional
torch.cuda.empty_cache()
wandb.init(project="x")
with torch.no_grad() as a:
    def f(a: Optional[torch.Tensor] = None, b: torch.Tensor | None = None, c: list[torch.Tensor] = ()) -> None: ...
gpus, kind = U.NUM_GPUS_OF_HARDWARE["GB200"], U.GENERATION_HARDWARE["H100"]
assert (gpus, kind) == (4, "Hopper") and U.create_run_id() and not U.check_has_nvlink()
{CALL}
if torch.ended:
    pass
"""
    assert launched(tmp_path, text).arguments == GIVEN


def test_known_values_are_compared_as_ever(tmp_path: Path) -> None:
    """`is` and isinstance of what is known, in the launcher and in a module next to it, which is looked at as well."""
    near = "def none(x):\n    return x is None, isinstance(x, int | str)\n"
    (tmp_path / "near.py").write_text(near)
    text = f"""{HELPER}import near, torch
assert near.none(None) == (True, False) and near.none(1) == (False, True)
a = object()
assert (a is a, a is not a, isinstance(a, object), 1 if torch.x is None else 2) == (True, False, True, 2)
{CALL}"""
    assert launched(tmp_path, text).arguments == GIVEN
    with pytest.raises(UsageError, match=r"line 2 of near\.py depends on torch\.size"):
        launched(tmp_path, f"{HELPER}import near, torch\nnear.none(torch.size)\n{CALL}")


COMMANDS = f"""{HELPER}import typer
app = typer.Typer()
@app.callback()
def first(model: str = "/m"):
    global M
    M = model
@app.command()
def prepare_all():
    pass
@app.command(name="go")
def train(steps: int = 1):
    U.execute_train(train_args=f"--hf-checkpoint {{M}} --num-rollout {{steps}}", num_gpus_per_node=8)
app()
"""


def test_one_of_several_commands_is_chosen(tmp_path: Path) -> None:
    """By command=NAME; without it the error names all of them."""
    with pytest.raises(UsageError, match="prepare-all, go; write command=VALUE"):
        launched(tmp_path, COMMANDS)
    found = launched(tmp_path, COMMANDS, command="go", steps="4", model="/n").arguments
    assert found == ("--hf-checkpoint", "/n", "--num-rollout", "4")
    with pytest.raises(UsageError, match="command=go-on: is none of prepare-all"):
        launched(tmp_path, COMMANDS, command="go-on")
    with pytest.raises(UsageError, match="starts neither"):
        launched(tmp_path, COMMANDS, command="prepare_all")


def test_a_package_that_may_be_missing_is_a_note(tmp_path: Path) -> None:
    text = f"""{HELPER}import importlib.util
try:
    import deep_ep
except ImportError:
    deep_ep = None
importlib.util.find_spec("flash_attn")
import torch
{CALL}"""
    notes = launched(tmp_path, text).notes
    assert [note.split()[1] for note in notes if "is installed" in note] == ["4", "7"]


SETTINGS = "# of mine\na: 1e-6\nb: 1.0e-6\nc: true\nd: [x, 2]\nlist:\n  - y\n- 'z # 1'\nn:\n"


def test_yaml_next_to_it_is_read(tmp_path: Path) -> None:
    """Names with values are read as YAML 1.1 has them; anything else is refused with its line."""
    (tmp_path / "x.yaml").write_text(SETTINGS.replace("z # 1", "z"))
    read = f"{HELPER}import os, yaml\nfound = yaml.safe_load(open(os.path.dirname(__file__) + '/x.yaml'))\n"
    wanted = {"a": "1e-6", "b": 1e-6, "c": True, "d": ["x", 2], "list": ["y", "z"], "n": None}
    assert launched(tmp_path, f"{read}assert found == {wanted}, found\n{CALL}").arguments == GIVEN
    for line in ("deep:\n  a: 1\n", "a: |\n  text\n", "a: 0o17\n", "a: 1_000\n"):
        (tmp_path / "x.yaml").write_text(f"b: 1\n{line}")
        with pytest.raises(UsageError, match=r"x\.yaml line [23]"):
            launched(tmp_path, read + CALL)


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


PARSER = f"{HELPER}import argparse\np = argparse.ArgumentParser()\n"
FLAG = PARSER + "p.add_argument('--a', {})\n"
OPTION = HELPER + "import typer\ndef go(a{} = typer.Option({})):\n    assert a == {}, a\n    {}typer.run(go)\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("declared", "given", "value"),
    [
        ("action='store_true'", "false", False),
        ("action='store_true'", "true", True),
        ("action='store_false'", "false", False),
        ("action='store_false'", "yes", True),
        ("action=argparse.BooleanOptionalAction", "true", True),
        ("action=argparse.BooleanOptionalAction, default=True", "0", False),
        ("default='b'", "two words", "two words"),
        ("default='b'", "", ""),
        ("default='b'", "--lr 3", "--lr 3"),
        ("nargs='+', type=int", "1 2", [1, 2]),
    ],
)
@pytest.mark.parametrize("call", ["p.parse_args()", "p.parse_known_args()[0]"])
def test_values_of_argparse(declared: str, given: str, value: object, call: str, tmp_path: Path) -> None:
    """A flag has the value that NAME=VALUE says, whichever of argparse's ways the launcher takes."""
    text = f"{FLAG.format(declared)}a = {call}.a\nassert a == {value!r}, a\n{CALL}"
    assert launched(tmp_path, text, a=given).arguments == GIVEN


def test_words_without_a_flag(tmp_path: Path) -> None:
    text = f"{PARSER}p.add_argument('a', nargs='?')\np.add_argument('b', nargs='?')\n_ = p.parse_args()\n"
    assert launched(tmp_path, f"{text}assert (_.a, _.b) == ('-x', 'y')\n{CALL}", a="-x", b="y").arguments == GIVEN
    with pytest.raises(UsageError, match="give a as well"):
        launched(tmp_path, text + CALL, b="y")


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OPTION.format(": str", "...", "1", CALL), "write a=VALUE after the script"),
        (OPTION.format(": str", "help='x'", "1", CALL), "write a=VALUE after the script"),
        (OPTION.format("", "default_factory=lambda: 5", "5", CALL), ""),
        (OPTION.format(": str", "None", "None", CALL), ""),
    ],
)
def test_defaults_of_typer(text: str, told: str, tmp_path: Path) -> None:
    """An option without a default must be given, and a factory makes one."""
    if not told:
        assert launched(tmp_path, text).arguments == GIVEN
        return
    with pytest.raises(UsageError, match=told):
        launched(tmp_path, text)
    assert launched(tmp_path, text.replace("a == 1", "a == '1'"), a="1").arguments == GIVEN


FIELD = f"{HELPER}import enum, tyro\nfrom dataclasses import dataclass, field\nfrom typing import Literal\n"
MODE = "class M(enum.Enum):\n    x = 'y'\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("declared", "given", "value"),
    [
        ("a: list[float] = field(default_factory=list)", "1e-6,2", "[1e-6, 2.0]"),
        ("a: tuple[str, ...] = ()", '["b, c"]', "('b, c',)"),
        ("a: list[int] | None = None", "3", "[3]"),
        ("a: int | None = 3", "none", "None"),
        ("a: M = M.x", "y", "M.x"),
        ("a: Literal[4, 8] = 4", "8", "8"),
    ],
)
def test_types_of_fields(declared: str, given: str, value: str, tmp_path: Path) -> None:
    text = f"{FIELD}{MODE}@dataclass\nclass A:\n    {declared}\na = tyro.cli(A).a\nassert a == {value}, a\n{CALL}"
    assert launched(tmp_path, text, a=given).arguments == GIVEN


def test_types_of_parameters_are_their_defaults(tmp_path: Path) -> None:
    """What is not annotated has its default's type, and the sandbox's own variables are no settings."""
    text = f"""{HELPER}import fire
def go(steps=3, fast=True, LANG='x'):
    assert (steps, fast, LANG) == (4, False, 'x'), (steps, fast, LANG)
    {CALL}fire.Fire(go)
"""
    assert launched(tmp_path, text, steps="4", fast="false").arguments == GIVEN
    for wrong in ({"steps": "x"}, {"fast": "maybe"}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))}="):
            launched(tmp_path, text, **wrong)


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


def test_what_nothing_reads_is_refused(tmp_path: Path) -> None:
    """A NAME=VALUE without effect is an error that names the setting which may be meant."""
    for text in (DATACLASS, f"{PARSER}p.add_argument('--model-name')\np.parse_args()\n{CALL}"):
        with pytest.raises(UsageError, match="does not read model_nam,") as error:
            launched(tmp_path, text, model_nam="x")
        assert "mean model_name?" in str(error.value)


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
