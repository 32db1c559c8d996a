"""Scripts as users write them, and as nobody should: what reaches train.py, or one clear error; never a hang, never a
trace."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import UsageError
from hpcrl.sandbox.run import LIMITS
from hpcrl.sandbox.slime_script import RunScript, run_script
from hpcrl.utils.plain_text import CONTROL

GIVEN = ("--hf-checkpoint", "/m", "--num-rollout", "1")
TRAIN = "train.py " + " ".join(GIVEN)


def read(path: Path, text: str, seconds: float = 20.0, **variables: str) -> RunScript:
    file = path / "run-x.sh"
    file.write_text(text)
    return run_script(file, variables, seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        f"/opt/conda/bin/python -u /root/slime/{TRAIN}",
        f'PYTHON=/usr/bin/python3; "$PYTHON" {TRAIN}',
        f"export PATH=/usr/local/cuda/bin:/usr/bin:$PATH\nexec python3 {TRAIN}",
        f"env CUDA_VISIBLE_DEVICES=0 python3 {TRAIN}",
        f"timeout 3600 torchrun --nproc-per-node 8 {TRAIN} 2>&1 | tee /nowhere/log.txt",
        "set -euo pipefail\nmkdir -p /nowhere/logs\ncat > /nowhere/cfg.yaml <<EOF\na: 1\nEOF\nN=$(nvidia-smi -L | "
        f"grep GPU | wc -l)\ngrep -q x /nowhere\npython3 {TRAIN}",
        f"trap 'exit 1' ERR\nfalse\nnohup python3 {TRAIN} > /nowhere/log.txt 2>&1 &\nPID=$!\ntrap 'kill $PID' "
        "EXIT\nwait $PID",
        "source ~/.bashrc && conda activate slime\ncd /root/nowhere || exit 1\nuntil curl -s http://localhost:8265; "
        f"do sleep 1; done\npython3 {TRAIN}",
        f"docker exec box bash -c 'cd /root && python3 {TRAIN} --lr 1'",
        f'CMD="python3 {TRAIN}"\neval "$CMD"',
        'run() { local n=$1; shift; python3 train.py --hf-checkpoint "$n" "$@"; }\nmapfile -t MORE < <(printf "%s\\n" '
        '--num-rollout 1)\nrun /m "${MORE[@]}"',
        'ARGS=()\nfor f in --hf-checkpoint:/m --num-rollout:1; do ARGS+=("${f%%:*}" "${f##*:}"); done\nray job submit '
        '-- python3 train.py ${ARGS[@]}',
        "#SBATCH --nodes=2\nsrun -w $(scontrol show hostnames | head -1) ray start --head &\nsrun --overlap ray job "
        f"submit -- python3 {TRAIN}",
        f"python3 {TRAIN}\n[ $? -eq 0 ] || exit 3\nwhile :; do sleep 1; done",
    ],
)  # fmt: skip
def test_forms_of_a_start(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text).arguments[:4] == GIVEN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[ -d /root/Qwen3-4B ] || { echo 'no model'; exit 1; }", "it ended with status 1: no model"),
        (": ${BASE_DIR:?is needed}", "BASE_DIR: is needed; write BASE_DIR=VALUE after the script"),
        ('if [ -z "$BASE_FOLDER" ]; then echo "BASE_FOLDER is not set"; exit 1; fi', "write BASE_FOLDER=VALUE after"),
        ('[ -n "${DATA:-}" ] || { echo "Error: DATA must be set" >&2; exit 1; }', "write DATA=VALUE after"),
        (
            "A=(--lr 1)\nB=(--num-rollout 3)\npython3 train.py ${A[@]} \\\n  --seed 1\n  ${B[@]} \\\n",
            "line 5: flags ran as",
        ),
        (
            "A=(--lr 1)\npython3 train.py ${A[@]}\n  --num-rollout 3\n",
            "line 3: flags ran as",
        ),
        ("while ! ray status | grep -q '8 GPU'; do sleep 5; done", "line 1 waits without end"),
        ("ARGS=(\r\n --lr 1\r\n)\r\npython3 train.py", "Windows line endings"),
        ("MODEL_ARGS += (--lr 1)", "line 1: `MODEL_ARGS += ("),
        ("while :; do :; done", "had not ended after 1 s"),
        ("python3 -c 'print(1)'\nexit 0", "starts neither train.py nor train_async.py"),
    ],
)
def test_why_a_script_comes_to_nothing(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        read(tmp_path, text, seconds=1.0 if ":; do :" in text else 20.0)


def test_what_it_started_before_it_hung_counts(tmp_path: Path) -> None:
    found = read(tmp_path, f"python3 {TRAIN} &\nwhile :; do :; done", seconds=4.0)
    assert found.arguments == GIVEN and "had not ended after 4 s" in found.notes[-1]


def test_notes_may_be_forged_but_harm_nobody(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "ln -s /etc/passwd $HPCRL_CALLS/1",
            "mkdir $HPCRL_CALLS/0",
            "printf 'source\\0' > $HPCRL_CALLS/2",
            "BASH_ENV= PATH= bash -c 'python3 train.py --again'",
            "ray $'\\e]0;title\\a' x",
            "source $'/nowhere/\\e]0;title\\a.sh'",
            "builtin trap - DEBUG; unset -f hpcrl_note python3",
            f"python3 {TRAIN}",
        ]
    )
    found = read(tmp_path, text)
    assert found.arguments == GIVEN
    assert not any("\x1b" in note for note in found.notes)


def test_process_and_output_limits(tmp_path: Path) -> None:
    """Neither processes nor output are without limit."""
    began = time.monotonic()
    text = "for i in {1..400}; do tail -f /dev/null & done; wait; python3 train.py"
    with pytest.raises(UsageError, match=f"more than {LIMITS.processes} processes|retry|fork"):
        read(tmp_path, text)
    with pytest.raises(UsageError, match="had not ended"):
        read(tmp_path, "cat /dev/zero; exit 1")
    assert time.monotonic() - began < 60


def test_what_is_printed_holds_no_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the recipe, which may go to a terminal, nor in what is said of flags; and the recipe can be read."""
    bad = "$'\\e]0;t\\a\\u202e\\x7f\\n[x]\\n'"
    file = tmp_path / "run-x.sh"
    file.write_text(f"python3 {TRAIN} --save {bad} --bogus-{bad} {bad} --num-rollout {bad}\n")
    assert main(["import", str(file)]) == 2
    said = capsys.readouterr()
    assert not CONTROL.search(said.out + said.err)
    assert tomllib.loads(said.out)["save"] == "\x1b]0;t\a\u202e\x7f\n[x]\n"
