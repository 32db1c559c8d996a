"""Whole GRPO runs: Megatron ranks, vLLM, queue, weight updates; the same numbers on both sides; resume; dead
engines."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from hpcrl.cli.main import main
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.report.page.panels import own_metrics
from hpcrl.report.run_files import Run as Files
from hpcrl.report.timeline.node_hours import NodeHours, node_hours
from hpcrl.report.timeline.reading import read_run, read_stage
from hpcrl.report.timeline.spans import (
    BUILD,
    ENGINES,
    FOLDER,
    GENERATE,
    IMPORT,
    MAKE,
    READ,
    READY,
    START,
    STEP,
    TRAIN,
    UPDATE,
    WAIT,
    merged_of,
)
from hpcrl.run.attempt_log import lowered_settings
from hpcrl.run.engine_files import end_of, read_views
from hpcrl.run.rundir import RunDir
from tests.support.mtp_models import make_mimo
from tests.support.out_of_memory import PLACES, engine_flags
from tests.support.runs import KEPT, POLICY, REPO, Run, all_gone, hold, metrics, recipe, role_pid, rows, samples

pytestmark = pytest.mark.vllm


#: a reference that is the policy again after every second rollout
KL = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "low_var_kl",
    "ref_update_interval": 2,
}


def start(path: Path, task: Path, flags: Sequence[str] = (), **values: object) -> Run:
    path.mkdir(exist_ok=True)
    root = path / "run"
    held = {"eval_prompt_data": ["heldout", str(task / "heldout.jsonl")], "eval_interval": 2, "eval_label_key": "label"}
    return Run(recipe(path, task, **(POLICY | held | {"run_dir": str(root)} | values)), *flags, root=root)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """A run on two data-parallel ranks that nobody disturbed, with a reference model; its rollouts are saved."""
    more = KL | {
        "ref_load": str(task / "model"),
        "save_debug_rollout_data": "{run}/data/{rollout_id}",
    }
    run = start(tmp_path_factory.mktemp("uncut"), task, actor_num_gpus_per_node=2, **more)
    key = run.root / "keys" / "http.key"
    run.until(key.exists)
    shutil.copy(key, run.root.parent)  # it ends with the run
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert re.fullmatch(r"held-out reward: 0\.\d\d -> 0\.\d\d  run", out.splitlines()[-1]), out
    assert all_gone(run.root, [])
    return run.root


def test_same_numbers_after_every_update(uncut: Path) -> None:
    """Trainer and engine have the same numbers after every update."""
    steps = metrics(uncut)
    assert list(steps) == list(range(5))
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["staleness/max"] == 0
        assert row["train/grad_norm"] > 0


def test_the_reference_follows_the_policy(uncut: Path) -> None:
    kl = [row["train/kl_loss"] for row in metrics(uncut).values()]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert 0 < kl[1] < 1
    held = [(path / "reference").is_dir() for path in sorted((uncut / "checkpoints").glob("iter_*"))]
    assert held == [True] * len(held) and held


def test_the_engine_has_read_no_weights(uncut: Path) -> None:
    """All that it has sampled with came from the trainers, of which the first version is the one that they have read."""
    log = (uncut / "logs/latest/engine-0.log").read_text()
    assert "starts with empty weights" in log and "; 0 tensors are read" in log


def test_the_weights_really_change_the_samples(uncut: Path) -> None:
    lines = [
        json.loads(line) for name, data in samples(uncut).items() if name[0].isdigit() for line in data.splitlines()
    ]
    assert len(lines) == 5 * 32
    rewards = [row["rollout/reward"] for row in metrics(uncut).values()]
    assert len(set(rewards)) > 1


def test_the_run_directory_holds_what_it_promises(uncut: Path) -> None:
    assert stat.S_IMODE(uncut.stat().st_mode) == 0o700
    for name in (
        "options.json",
        "metrics.jsonl",
        "curves.svg",
        "logs/latest/trainer-0.log",
        "logs/latest/engine-0.log",
        "logs/latest/rollout-0.log",
    ):
        assert (uncut / name).stat().st_size > 0, name
    assert list((uncut / "tensorboard").iterdir())
    evaluations = [row for row in rows(uncut) if "eval/heldout/accuracy" in row]
    assert [row["rollout_id"] for row in evaluations] == [-1, 1, 3, 4]


def test_the_trainer_says_what_it_runs_with(uncut: Path) -> None:
    """Once, of the model that was built, by rank 0 alone."""
    logs = [path.read_text() for path in sorted((uncut / "logs").glob("attempt-*/trainer-*.log"))]
    said = [line.partition(" ")[2] for log in logs for line in log.splitlines() if " runs on " in line]
    assert said == [
        "runs on the CPU: layers Megatron-core's own; attention torch's scaled_dot_product_attention; rotary embedding "
        "of hpcrl; optimizer torch's AdamW, distributed; gradient accumulation fusion off"
    ]


def test_what_every_process_did_is_recorded(uncut: Path) -> None:
    tracks = read_stage(uncut)
    assert [track.name for track in tracks] == ["engine-0", "host of 127.0.0.1", "rollout-0", "trainer-0", "trainer-1"]
    for trainer in tracks[-2:]:
        for name in (WAIT, TRAIN, STEP):
            assert [span.more["rollout_id"] for span in trainer.named(name)] == list(range(5)), name
        assert len(trainer.named(UPDATE)) == 6 and [span.more for span in trainer.named(READY)] == [{"rollout_id": 0}]
    for made, waited, busy in zip(
        tracks[2].named(MAKE), tracks[-2].named(WAIT), (row for row in rows(uncut) if "train/loss" in row), strict=True
    ):
        assert waited.begin - 50_000 <= made.begin < made.end <= waited.end + 50_000
        assert 0 < busy["perf/train_wait_time"] < busy["perf/step_time"] and 0 < busy["perf/engine_idle_ratio"] < 1
    assert sum(span.end - span.begin for span in tracks[2].named(GENERATE)) > 0
    for role, names in (
        ("trainer", (IMPORT, BUILD, READ, ENGINES, START)),
        ("rollout", (IMPORT,)),
        ("engine", (START,)),
    ):
        one = next(track for track in tracks if track.role == role)
        assert all(sum(span.end - span.begin for span in one.named(name)) > 0 for name in names), role
    hours = hours_of(uncut).phases
    assert hours["lost"] == 0
    assert all(hours[name] > 0 for name in ("training", "generating", "updating", "saving", "waiting", "starting")), (
        hours
    )
    assert main(["report", str(uncut)]) == main(["report", "--trace", str(uncut)]) == 0
    assert "held-out reward" in (uncut / "report.html").read_text()
    assert own_metrics([name for row in rows(uncut) for name in row]) == [], (
        "all that a run logs by itself is known to the page"
    )
    assert json.loads((uncut / "trace.json").read_text())["traceEvents"]


def test_key_is_nowhere_visible(uncut: Path) -> None:
    """The key of the run is nowhere in logs or command lines."""
    key = (uncut.parent / "http.key").read_text().strip()
    for log in uncut.glob("logs/*/*.log"):
        assert key not in log.read_text()


#: that of the uncut run, and what another module adds to it
REWARD = """\
from added import ADDED
from tests.support.runs import odd_tokens


async def reward(options, sample):
    return await odd_tokens(options, sample) + ADDED
"""


def own_reward(path: Path) -> str:
    """Write the reward into a directory; its name there."""
    (path / "mine.py").write_text(REWARD)
    (path / "added.py").write_text("ADDED = 0.0\n")
    return "mine.reward"


def ends(root: Path) -> list[str]:
    """Why each engine of a run has ended."""
    attempts = [RunDir(root, number) for number in range(RunDir.latest(root).attempt + 1)]
    found = [end_of(attempt, 0, incarnation) for attempt in attempts for incarnation in range(3)]
    return [end.why for end in found if end]


def serves(root: Path, after: int) -> bool:
    """Whether the engine of an attempt after that one has the present weights."""
    attempt = RunDir.latest(root)
    found = read_views(attempt.here)
    return attempt.attempt > after and found is not None and [one.state for one in found.engines] == ["serving"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """A run whose engine is killed, then the run itself; resumed from a checkpoint, it has an engine whose core is stopped
    for ever.  Both times another engine takes the weights and answers, in the same attempt or, where a weight update
    was under way, in the next.  What its reward imports is edited before it is resumed."""
    path = tmp_path_factory.mktemp("resumed")
    more = KL | {"ref_load": str(task / "model"), "custom_rm_path": own_reward(path)}
    faults = {"rollout_health_check_timeout": 5, "attempts": 3}
    run = start(path, task, actor_num_gpus_per_node=2, **more, **faults)
    hold(run.root, 1)
    run.until(lambda: run.steps() >= 1)
    os.kill(role_pid(run.root, "hpcrl.engine.server"), signal.SIGKILL)
    run.end_early(3, signal.SIGKILL)
    assert re.search("SIGKILL|died", ends(run.root)[0])
    (path / "added.py").write_text("ADDED = 100.0\n")
    killed = RunDir.latest(run.root).attempt
    run = Run("--resume", run.root, root=run.root)
    hold(run.root, 3)
    run.until(lambda: serves(run.root, killed))
    psutil.Process(role_pid(run.root, "hpcrl.engine.server")).children()[-1].suspend()
    hold(run.root)  # it has rollouts to answer
    status, out = run.end()
    assert status == 0, out + run.logs()
    return run.root


def test_ended_and_resumed_is_the_same_run(resumed: Path, uncut: Path) -> None:
    """With engines that die it is bit for bit the uncut run; it grades with the copy of an imported module that was edited
    since."""
    assert metrics(resumed) == metrics(uncut)
    assert samples(resumed) == samples(uncut)
    old = RunDir.latest(resumed).attempt >= 2  # an update under way when the first engine died ended an attempt
    assert (resumed / "logs" / "attempt-0").is_dir() and merged_of(resumed / FOLDER / "attempt-0").is_file() == old
    assert hours_of(resumed).starts == 2 and hours_of(resumed).phases["lost"] > 0
    # by the questions that it leaves unanswered, or before it is asked any by the state of its process
    found = ends(resumed)
    assert any(re.search("core has not answered|has been stopped for", end) for end in found), found
    assert all_gone(resumed, [])


def test_live_code_grades_with_the_edited_reward(tmp_path: Path, task: Path) -> None:
    """With --live-code a run grades with the edited module from then on."""
    run = start(tmp_path, task, num_rollout=1, custom_rm_path=own_reward(tmp_path))
    status, out = run.end()
    assert status == 0, out + run.logs()
    (tmp_path / "added.py").write_text("ADDED = 100.0\n")
    command = [sys.executable, "-m", "hpcrl", "resume", str(run.root), "--num-rollout", "2", "--live-code"]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (row["rollout/reward"] for row in metrics(run.root).values())
    assert first <= 1 and second >= 100
    assert all_gone(run.root, [])


def test_resumed_in_another_layout(tmp_path: Path, task: Path, uncut: Path) -> None:
    """TP 2 with two engines continues as DP 2 with one: losses and Adam's moments are those of the uncut run."""
    more = KL | {"ref_load": str(task / "model"), "tensor_model_parallel_size": 2, "rollout_num_gpus": 2}
    run = start(tmp_path, task, actor_num_gpus_per_node=2, **more)
    run.end_early(2, signal.SIGTERM)
    flags = "--tensor-model-parallel-size 1 --rollout-num-gpus 1 --max-tokens-per-gpu 64"
    command = [sys.executable, "-m", "hpcrl", "resume", str(run.root), *flags.split()]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr + run.logs()
    assert not list((run.root / "logs/latest").glob("engine-1*"))
    for step, row in metrics(uncut).items():
        found = metrics(run.root)[step]
        assert found["train/loss"] == pytest.approx(row["train/loss"], rel=1e-4, abs=1e-6), step
        assert found["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=1e-4), step
    moments, wanted = (states_of(root / "checkpoints/iter_0000005") for root in (run.root, uncut))
    assert moments.keys() == wanted.keys() and any("exp_avg_sq" in name for name in moments)
    for name, tensor in wanted.items():
        assert torch.allclose(moments[name], tensor, rtol=1e-3, atol=1e-6), name


def states_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Adam's moments and the fp32 weights of a checkpoint."""
    stored = TorchDist(checkpoint)
    return {name: stored.read(name) for name in stored.all if name.startswith("optimizer.state.")}


def test_a_stop_needs_no_rollout_process(tmp_path: Path, task: Path, uncut: Path) -> None:
    """It hangs while the trainer waits for samples: the trainer sees by itself that the run is to stop, and saves."""
    values = {"ref_load": str(task / "model"), "stop_timeout": 30, "save_interval": None}
    run = start(tmp_path, task, actor_num_gpus_per_node=2, **KL | values)
    hold(run.root, 2)
    run.until(lambda: run.steps() >= 2 and (tmp_path / "held.seen").exists())
    psutil.Process(role_pid(run.root, "hpcrl.rollout.main")).suspend()
    os.kill(run.process.pid, signal.SIGTERM)
    status, out = run.end()
    assert status == 143, out + run.logs()
    assert all_gone(run.root, [])
    assert run.steps() == 2 and (run.root / "checkpoints/iter_0000002").is_dir(), run.logs()
    hold(run.root)
    again = Run("--resume", run.root, root=run.root)
    status, out = again.end()
    assert status == 0, out + again.logs()
    assert metrics(run.root) == metrics(uncut) and samples(run.root) == samples(uncut)


def hours_of(root: Path) -> NodeHours:
    """What a run's node-hours went into."""
    run = Files(root)
    return node_hours(run, read_run(run))


def test_the_job_continues_after_faults(tmp_path: Path, task: Path, uncut: Path) -> None:
    """A rank, the rollout process and the host's own process are killed, one after another: the job continues each time,
    with the same engine as long as its host's process lives."""
    run = start(tmp_path, task, actor_num_gpus_per_node=2, **KEPT | KL | {"ref_load": str(task / "model")})
    engines = []
    for steps, victim in enumerate(("hpcrl.trainer", "hpcrl.rollout.main", "hpcrl.launch.host"), 1):
        hold(run.root, steps)
        run.until(lambda least=steps: run.steps() >= least)
        engines.append(role_pid(run.root, "hpcrl.engine.server"))
        os.kill(role_pid(run.root, victim), signal.SIGKILL)
        run.until(lambda next=steps: (run.root / f"attempts/{next}/peers/trainer-0.json").exists())
    hold(run.root)
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert all_gone(run.root, [])
    assert metrics(run.root) == metrics(uncut)
    assert samples(run.root) == samples(uncut)
    assert engines[0] == engines[1] == engines[2], "none had ended until then"
    assert [RunDir(run.root, attempt).failure().role for attempt in range(3)] == ["trainer", "rollout", "launcher"]
    assert out.count("begins on the same hosts; 1 engine continues") == 2 and out.count("begins on the same hosts") == 3
    log = (run.root / "logs/attempt-2/engine-0.log").read_text()
    assert log.count(" is up: ") == 1, "its log has followed the engine"
    assert hours_of(run.root).starts == 1 and hours_of(run.root).phases["lost"] > 0


def test_out_of_memory_uses_less(tmp_path: Path, task: Path, uncut: Path) -> None:
    """A rank without memory leaves the engine alone, and what was sampled is trained on, not made again; an engine without
    memory is restarted with less."""
    order = tmp_path / "no-memory"
    hooks = {
        "custom_megatron_before_train_step_hook_path": "tests.support.out_of_memory.in_a_rank",
        "custom_rm_path": "tests.support.out_of_memory.counted",
    }
    alone = dict.fromkeys(("eval_prompt_data", "eval_interval", "eval_label_key"))
    more = (
        KEPT
        | KL
        | hooks
        | alone
        | {"ref_load": str(task / "model"), "oom_retries": 4, "save_interval": 1, "deterministic_mode": False}
    )
    run = start(tmp_path, task, engine_flags(order), actor_num_gpus_per_node=2, **more)
    *before, last = PLACES
    run.until((run.root / "options.json").exists)
    for place in before:  # tests/whole_runs/test_sft_run.py has a rank without memory in each
        (run.root / place).touch()
    run.until((run.root / last).exists)
    engine = role_pid(run.root, "hpcrl.engine.server")
    order.touch()
    run.until((run.root / "attempts/2/peers/engine-0.json").exists)
    assert role_pid(run.root, "hpcrl.engine.server") != engine
    status, out = run.end()
    assert status == 0, out + run.logs()
    failures = [RunDir(run.root, attempt).failure() for attempt in range(2)]
    assert [failure.role for failure in failures] == ["trainer", "engine"], failures
    assert out.count("begins on the same hosts; 1 engine continues") == 1
    told = [one.what for one in lowered_settings(run.root)]
    assert len(told) == 2 and re.fullmatch(r"--vllm-gpu-memory-utilization 0\.\d+ instead of .*engine-0.*", told[1]), (
        told
    )
    assert len((run.root / "graded").read_text().splitlines()) == 5 * 8 * 4, "each sample was made once"
    found = metrics(run.root)
    for step, row in metrics(uncut).items():
        assert found[step]["train/loss"] == pytest.approx(row["train/loss"], rel=1e-4, abs=1e-6), step


def test_sharing_slots_changes_no_number(tmp_path: Path, task: Path, uncut: Path) -> None:
    """--colocate: the engine on the slot of a trainer rank, asleep while these train; it ends, and is resumed, in
    between."""
    run = start(tmp_path, task, actor_num_gpus_per_node=2, colocate=True, **KL | {"ref_load": str(task / "model")})
    run.end_early(2, signal.SIGTERM)
    assert hours_of(run.root).phases["lost"] == 0
    again = Run("--resume", run.root, root=run.root)
    status, out = again.end()
    assert status == 0, out + again.logs()
    assert metrics(run.root) == metrics(uncut)
    assert samples(run.root) == samples(uncut)
    evaluations = [row["rollout_id"] for row in rows(run.root) if "eval/heldout/accuracy" in row]
    assert evaluations == [-1, 1, 3, 4]
    log = "".join(path.read_text() for path in run.root.glob("logs/attempt-*/trainer-0.log"))
    assert log.count("the engines sleep, and have given back") >= 5, log
    assert [row["rollout_id"] for row in rows(run.root) if "perf/hand_over_time" in row] == list(range(5))


def test_training_from_saved_rollouts(tmp_path: Path, task: Path, uncut: Path) -> None:
    """Training from saved rollouts gives the same losses."""
    more = {"actor_num_gpus_per_node": 2, "load_debug_rollout_data": str(uncut / "data/{rollout_id}")}
    run = start(tmp_path, task, **KL | {"ref_load": str(task / "model")} | more)
    status, out = run.end()
    assert status == 0, out + run.logs()
    of_prompts = {"data/epoch", "data/dropped"}  # no prompt file was read
    assert metrics(run.root) == {
        step: {k: v for k, v in row.items() if k not in of_prompts} for step, row in metrics(uncut).items()
    }
    assert not list(run.root.glob("logs/*/engine-*.log")) and samples(run.root).items() <= samples(uncut).items()


def test_sampling_alone_trains_nothing(tmp_path: Path, task: Path, uncut: Path) -> None:
    """With the weights that the trained run began with: so its first samples are the same, also after a stop."""
    run = start(tmp_path, task, debug_rollout_only=True, num_rollout=3, actor_num_gpus_per_node=2)
    run.until(lambda: (run.root / "samples/00000001.jsonl").exists())
    os.kill(run.process.pid, signal.SIGTERM)
    status, out = run.end()
    again = Run("--resume", run.root, root=run.root)
    if status != 0:  # it may have been done already
        assert status == 143, out + run.logs()
        status, out = again.end()
    else:
        again.end()
    assert status == 0, out + again.logs()
    found = samples(run.root)
    assert found["00000000.jsonl"] == samples(uncut)["00000000.jsonl"]
    assert {f"{step:08d}.jsonl" for step in range(3)} <= set(found)
    numbers = [row["rollout_id"] for row in rows(run.root) if "rollout/reward" in row]
    assert numbers == [0, 1, 2] and not list((run.root / "checkpoints").iterdir())


def test_samples_with_the_trainers_numbers(uncut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples are shown with what the trainer computed for them."""
    assert main(["samples", str(uncut), "--best", "-n", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"step 4, group \d+, sample \d  reward [\d.]+  \w+, \d+ \+ \d+ tokens  advantage \+", text), text
    assert re.search(r"log-prob a token: trainer (-[\d.]+), engine (-[\d.]+); they differ by \d", text), text
    assert main(["samples", str(uncut), "--diff", "0", "0"]) == 0
    assert "same prompts in step 0 and step 0" in capsys.readouterr().out


def test_dead_engine_without_restarts(tmp_path: Path, task: Path) -> None:
    """Without restarts a dead engine is named, and everything ends."""
    run = start(tmp_path, task, num_rollout=100000, save_interval=None, attempts=1)
    run.until(lambda: run.steps() >= 1)
    pids = run.pids()
    os.kill(role_pid(run.root, "hpcrl.engine.server"), signal.SIGKILL)
    status, out = run.end()
    error = next(line for line in out.splitlines() if line.startswith("hpcrl: error: "))
    assert status not in (0, 143), out
    assert re.search(r"engine.0 on 127\.0\.0\.1.*(died|SIGKILL)", error), out
    assert all_gone(run.root, pids)


def test_an_engine_that_never_comes_up_is_named(tmp_path: Path, task: Path) -> None:
    run = start(tmp_path, task, engine_start_timeout=3)
    status, out = run.end(60)
    assert status not in (0, 143)
    assert "engine-0" in out and "3 s" in out, out
    assert all_gone(run.root, [])


def test_a_bound_on_the_difference_stops_the_run(tmp_path: Path, task: Path, uncut: Path) -> None:
    """With what an engine has sampled before: the trainer compares as ever."""
    run = start(tmp_path, task, max_logprob_diff=1e-12, load_debug_rollout_data=str(uncut / "data/{rollout_id}"))
    status, out = run.end()
    assert status not in (0, 143)
    assert "--max-logprob-diff" in out and "1e-12" in out, out


def test_replay_with_another_learning_rate(tmp_path: Path, task: Path, uncut: Path) -> None:
    """Its weights leave those of the sampler behind, which no bound of a run that samples may stop."""
    run = start(tmp_path, task, lr=3e-2, num_rollout=3, load_debug_rollout_data=str(uncut / "data/{rollout_id}"))
    status, out = run.end()
    assert status == 0, out + run.logs()
    found = [row["train/train_rollout_logprob_abs_diff"] for row in metrics(run.root).values()]
    assert len(found) == 3 and found[0] <= 1e-5 and found[2] > 1e-3, found


def test_long_prompts_that_do_not_fit_one_batch(tmp_path: Path, task: Path) -> None:
    """128 prompts of some 150 tokens are more than one forward pass takes; each request has a seed."""
    rows = [{"prompt": "1+2+3+4+5+6+7+8+9+" * 8 + f"{i}=", "label": str(i)} for i in range(16)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 8,
        "rollout_max_context_len": 256,
        "max_tokens_per_gpu": 2048,
    }
    more = {
        "prompt_data": str(tmp_path / "long.jsonl"),
        "num_rollout": 2,
        "eval_interval": None,
        "eval_prompt_data": None,
        "eval_label_key": None,
    }
    run = start(tmp_path, task, **values, **more)
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in metrics(run.root).values())


def test_a_run_that_trains_what_drafts(tmp_path: Path, task: Path) -> None:
    """Two tensor-parallel ranks send their own pieces; each update is compared."""
    drafts = '{ method = "mtp", num_speculative_tokens = 1 }'
    more = {
        "num_rollout": 3,
        "actor_num_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "check_weight_update_equal": True,
        "mtp_num_layers": 1,
        "enable_mtp_training": True,
    }
    path = recipe(tmp_path, task, **(POLICY | more | {"run_dir": str(tmp_path / "run")}))
    path.write_text(path.read_text() + f"[vllm]\nspeculative_config = {drafts}\n")
    run = Run(path, "--hf-checkpoint", make_mimo(tmp_path / "model"), root=tmp_path / "run")
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert "no weight update brings" not in out
    found = [row for row in rows(run.root) if "train/loss" in row]
    assert len(found) == 3
    for row in found:
        assert 0 <= row["rollout/spec_accept_rate"] <= 1 <= row["rollout/spec_accept_length"] <= 2
        assert row["train/mtp_loss"] > 0 and row["perf/update_weights_bytes"] > 0
        assert not own_metrics([name for name in row if name.startswith("rollout/spec")])
