"""Grading in processes of their own: limits, deaths, own rewards, groups, weights, and what is said of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_names import own_reward, read_words
from hpcrl.errors import CodeError, DataError, HpcrlError, UsageError
from hpcrl.rollout import worker_pool
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.grading import service
from hpcrl.rollout.grading.service import GradedBy, Grading, Tally, grading_metrics
from hpcrl.rollout.prompts.prompt_files import PromptFile
from hpcrl.sample import Sample
from tests.support.able import needs
from tests.support.http_server import Server
from tests.support.runs import gone
from tests.support.shares import plain_sample

pytestmark = pytest.mark.process  # rewards run in processes of their own

HERE = "tests.support.own_rewards"
#: starts a process that grades, says its number, and is killed
PARENT = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from hpcrl.config.options import Options
from hpcrl.rollout.grading.service import Grading
async def main():
    grading = Grading(Options(rm_type="exact"))
    await grading.start()
    print(grading.pool.processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def sample(response: str, label: Any = None, group_index: int = 7, response_index: int = 3, **metadata: Any) -> Sample:
    own = {
        "group_index": group_index,
        "response_index": response_index,
        "response": response,
        "label": label,
        "metadata": metadata,
    }
    return plain_sample(prompt="1+1=", **own)


def run(
    body: Callable[[Grading], Coroutine[Any, Any, Any]], files: list[PromptFile] | None = None, **values: Any
) -> Any:
    """`body` with the rewards of these options; afterwards none of its processes is left."""
    options = Options(**({"reward_max_failed": 1.0} | values))

    async def go() -> Any:
        grading = Grading(options, files or [])
        try:
            await asyncio.wait_for(grading.start(), 60)
            return await asyncio.wait_for(body(grading), 90)
        finally:
            await grading.close()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = asyncio.run(go())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "no process is left"
    return found


async def grade(
    grading: Grading,
    *samples: Sample,
    each: int = 1,
    what: str = "rollout 0",
    size: int = 100,
    where: str = "p.jsonl, line 9",
) -> list[Sample]:
    tally = grading.tally(what, size, each)
    await asyncio.gather(*(grading.grade(s, where, tally) for s in samples))
    return list(samples)


def graded(*samples: Sample, each: int = 1, **values: Any) -> list[Sample]:
    return run(lambda grading: grade(grading, *samples, each=each), **values)


# ---- what is graded


def test_many_answers_by_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "worker_count", lambda: 2)
    samples = [
        sample(rf"so \boxed{{{number}/2}}", number / 2 if number % 3 else "wrong", response_index=number)
        for number in range(200)
    ]
    found = graded(*samples, rm_type="math")
    assert [s.reward for s in found] == [float(number % 3 > 0) for number in range(200)]
    assert grading_metrics(found) == {"reward_timeouts": 0.0, "reward_errors": 0.0}


def test_ten_megabytes_do_not_block_the_event_loop() -> None:
    async def body(grading: Grading) -> tuple[float, float]:
        big = sample("{" * 10_000_000 + r"\boxed{" + "{" * 500_000, "7")
        latest, slowest = time.process_time(), 0.0

        async def beat() -> None:
            nonlocal latest, slowest
            while True:
                await asyncio.sleep(0.005)
                now = time.process_time()  # what other processes do meanwhile does not count
                slowest, latest = max(slowest, now - latest), now

        beating = asyncio.create_task(beat())
        await grade(grading, big)
        await asyncio.sleep(0.01)
        begun, stalled = time.process_time(), slowest
        find_boxed(big.response)
        beating.cancel()
        assert big.reward == 0
        return stalled, time.process_time() - begun

    stalled, searched = run(body, rm_type="math")
    assert stalled < searched


def test_several_rewards_are_weighed_and_kept_by_name() -> None:
    (one, two) = graded(sample("4 4 4", "4"), sample("4", "4"), rm_type=["exact:2", "boxed_f1", f"{HERE}.length:-0.5"])
    assert (one.reward, one.rewards) == (-2.5, {"exact": 0.0, "boxed_f1": 0.0, "length": 5.0})
    assert (two.reward, two.rewards) == (1.5, {"exact": 1.0, "boxed_f1": 0.0, "length": 1.0})
    assert grading_metrics([one, two])["reward/length"] == 3.0


def test_a_prompt_may_name_its_reward() -> None:
    files = [PromptFile(Path("p.jsonl"), (), 0, "", types={"f1": "p.jsonl, line 1", "boxed_exact": "p.jsonl, line 2"})]
    samples = [
        sample("the cat", "cat", rm_type="f1"),
        sample(r"\boxed{cat}", "cat", rm_type=" boxed_exact "),
        sample("cat", "cat"),
        sample("cat", "cat", rm_type=" "),
    ]
    found = run(lambda grading: grade(grading, *samples), files, rm_type="math")
    assert [s.reward for s in found] == [1.0, 1.0, 0.0, 0.0]


def test_a_set_may_have_rewards_of_its_own() -> None:
    """They take the place of the run's; of metadata that names another only where the set says so."""
    files = [PromptFile(Path("p.jsonl"), (), 0, "", types={"exact": "p.jsonl, line 1"})]
    own = GradedBy(read_words("f1")), GradedBy(read_words(["f1"]), own_types=False)
    samples = [
        sample("the cat", "cat"),
        sample("the cat", "cat", rm_type="exact"),
        sample("the cat", "cat", rm_type="exact"),
    ]

    async def body(grading: Grading) -> list[float]:
        tally = grading.tally("evaluation", 10, 1)
        for one, by in zip(samples, (own[0], own[0], own[1]), strict=True):
            await grading.grade(one, "p", tally, by)
        return [one.reward for one in samples]

    async def whole() -> list[float]:
        grading = Grading(Options(rm_type="math"), files, read_words("f1"))
        try:
            await grading.start()
            return await body(grading)
        finally:
            await grading.close()

    assert asyncio.run(whole()) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("f2", "line 4: metadata rm_type: f2"),
        ("os.system", "reward of hpcrl's"),
        ("remote_rm", "--rm-url is not given"),
    ],
)
def test_a_prompt_that_names_no_reward_is_refused(name: str, words: str) -> None:
    files = [PromptFile(Path("p.jsonl"), (), 0, "", types={name: "p.jsonl, line 4"})]
    with pytest.raises(DataError) as caught:
        Grading(Options(rm_type="math"), files)
    assert words in str(caught.value) and "p.jsonl" in str(caught.value)


# ---- own rewards


def test_custom_reward_sees_the_sample() -> None:
    """A custom reward sees the options and the whole sample."""
    (found,) = graded(
        sample("abc", {"a": 1}, key="value"), custom_rm_path=f"{HERE}.sees_everything", rollout_temperature=0.5
    )
    assert found.grading_error == "" and found.reward == 1.0


def test_the_rewards_of_the_document_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (tmp_path / "my_rewards.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (one,) = graded(sample("x"), custom_rm_path="my_rewards.brief", rollout_max_response_len=12)
    assert one.reward == 0.75
    with Server([(200, b'{"score": 0.5}')]) as server:
        (one,) = graded(sample("x"), custom_rm_path="my_rewards.judged", rm_url=server.url)
        assert one.reward == 0.5
    found = graded(
        sample("xx", response_index=0),
        sample("x", response_index=1),
        each=2,
        custom_rm_path="my_rewards.ranked",
        group_rm=True,
    )
    assert [s.reward for s in found] == [0.5, 0.0]


def test_kinds_of_reward_functions() -> None:
    """Plain and async functions, classes and keyword arguments."""
    for name in ("length", "length_async", "Length", "length_with_more"):
        assert [s.reward for s in graded(sample("1234"), custom_rm_path=f"{HERE}.{name}")] == [4.0]


@pytest.mark.core
def test_a_plain_reward_may_call_asyncio_run() -> None:
    """Alone and for a group, in a thread to which signals go; the process then grades on."""
    for _ in range(2):
        assert [s.reward for s in graded(sample("1234"), sample("12"), custom_rm_path=f"{HERE}.judged_by_run")] == [
            4,
            2,
        ]
    pair = (sample("1234", response_index=0), sample("12", response_index=1))
    found = graded(*pair, each=2, custom_rm_path=f"{HERE}.groups_judged_by_run", group_rm=True)
    assert [s.reward for s in found] == [4, 2]


def test_async_rewards_run_side_by_side() -> None:
    begun = time.monotonic()
    found = graded(*(sample("x", response_index=i) for i in range(600)), custom_rm_path=f"{HERE}.waits_half_a_second")
    assert [s.reward for s in found] == [1.0] * 600 and time.monotonic() - begun < 90


def test_a_server_is_asked_many_things_at_once() -> None:
    with Server([(200, b"0.5")], delay=0.3) as server:
        found = graded(*(sample("x", response_index=i) for i in range(40)), rm_type="remote_rm", rm_url=server.url)
        assert [s.reward for s in found] == [0.5] * 40 and server.busiest > 8


def test_a_group_is_graded_in_one_call() -> None:
    samples = [
        sample("x" * length, group_index=group, response_index=index)
        for group in (1, 2)
        for index, length in enumerate((3, 1, 2))
    ]
    found = graded(*reversed(samples), each=3, custom_rm_path=f"{HERE}.ranks", group_rm=True)
    assert [s.reward for s in reversed(found)] == [2.0, 0.0, 1.0] * 2


def test_an_object_needs_a_key() -> None:
    options = {"custom_rm_path": f"{HERE}.as_object", "reward_key": "score"}

    async def body(grading: Grading) -> list[Sample]:
        samples = [sample("abc"), sample("abc")]
        tally = grading.tally("rollout 0", 10, 1)
        await grading.grade(samples[0], "p", tally)
        await grading.grade(samples[1], "p", tally, GradedBy((own_reward(f"{HERE}.as_object"),), False, "length"))
        return samples

    train, held = run(body, **options)
    assert (train.score, held.score, held.reward["length"]) == (0.5, 3.0, 3.0) and train.rewards == {
        "score": 0.5,
        "length": 3.0,
    }
    (without,) = graded(sample("abc"), custom_rm_path=f"{HERE}.as_object")
    assert without.grading == "error" and "score, length, why: give --reward-key" in without.grading_error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_nan", "reward must be finite"),
        ("returns_too_much", "reward must be finite"),
        ("returns_text", "returned 'good', which is"),
        ("returns_nothing", "returned None, which is"),
        ("raises", "raised KeyError: 'answer' (own_rewards.py:"),
        ("exits", "raised SystemExit: 3"),
        ("dies", "process (exit status 7)"),
        ("is_killed", "process (signal SIGKILL)"),
        ("takes_memory", "needs more memory"),
    ],
)
@pytest.mark.core
def test_a_grading_that_fails_costs_its_sample(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "MEMORY", 300 << 20)
    bad, good = graded(sample("bad"), sample("good", response_index=4), custom_rm_path=f"{HERE}.{name}")
    assert (bad.reward, bad.grading) == (0.0, "error") and words in bad.grading_error, bad.grading_error
    assert (good.reward, good.grading) == (1.0, "")
    assert grading_metrics([bad, good])["reward_errors"] == 1.0
    said = capfd.readouterr().err
    assert f"failed grading: reward {HERE}.{name}" in said and "on response 3 of group 7 (p.jsonl, line 9)" in said
    if name == "raises":
        assert "Traceback" in said and 'own_rewards.py", line' in said and 'return sample.metadata["answer"]' in said


def test_what_a_reward_prints_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = graded(sample("x"), custom_rm_path=f"{HERE}.prints")
    assert found.reward == 1.0 and "hello from the reward" in capfd.readouterr().err


# ---- limits


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("sleeps", {"reward_timeout": 1.5}, "--reward-timeout 1.5 s"),
        ("sleeps_async", {"reward_timeout": 1.5}, "--reward-timeout 1.5 s"),
        ("spins", {"reward_cpu_limit": 0.5}, "--reward-cpu-limit 0.5 s of CPU time"),
        ("blocks_the_loop", {"reward_timeout": 1.5}, "--reward-timeout 1.5 s"),
        ("ignores_signals", {"reward_timeout": 1.5}, "--reward-timeout 1.5 s"),
    ],
)
def test_a_grading_that_never_returns_is_a_time_out(name: str, values: dict[str, Any], words: str) -> None:
    begun = time.monotonic()
    found = graded(
        sample("bad"),
        *(sample("good", response_index=i) for i in range(4, 8)),
        custom_rm_path=f"{HERE}.{name}",
        **values,
    )
    assert (found[0].reward, found[0].grading) == (0.0, "timeout") and words in found[0].grading_error
    assert [(s.reward, s.grading) for s in found[1:]] == [(1.0, "")] * 4, "those that shared its process lose nothing"
    assert grading_metrics(found)["reward_timeouts"] == 1.0 and time.monotonic() - begun < 60


def test_what_a_killed_reward_had_started_is_ended_too(tmp_path: Path) -> None:
    graded(sample(str(tmp_path / "pid")), custom_rm_path=f"{HERE}.starts_a_process", reward_timeout=5.0)
    pid = int((tmp_path / "pid").read_text())
    assert gone([pid])


def stop_after_start(grading: Grading) -> int:
    (process,) = grading.pool.processes
    os.kill(process.pid, signal.SIGSTOP)
    return process.pid


@pytest.mark.parametrize("deterministic", [False, True])
def test_stopped_process_times_out(deterministic: bool) -> None:
    """A stopped process is a time-out, and is retried in deterministic mode."""

    async def body(grading: Grading) -> list[Sample]:
        stop_after_start(grading)
        return await grade(grading, sample(r"\boxed{1/2}", "0.5"))

    (found,) = run(body, rm_type="math", reward_timeout=1.0, deterministic_mode=deterministic)
    assert (found.reward, found.grading) == ((1.0, "") if deterministic else (0.0, "timeout"))


def test_a_process_that_goes_on_in_time_costs_nothing() -> None:
    async def body(grading: Grading) -> list[Sample]:
        pid = stop_after_start(grading)
        asyncio.get_running_loop().call_later(2.5, os.kill, pid, signal.SIGCONT)
        return await grade(grading, sample(r"\boxed{1/2}", "0.5"))

    (found,) = run(body, rm_type="math", reward_cpu_limit=1.0)
    assert (found.reward, found.grading) == (1.0, ""), "CPU time counts, not the clock"


def test_an_idle_process_that_is_killed_is_replaced() -> None:
    async def body(grading: Grading) -> list[Sample]:
        os.kill(grading.pool.processes[0].pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return await grade(grading, sample(r"\boxed{1/2}", "0.5"))

    assert run(body, rm_type="math")[0].reward == 1.0


def test_a_failure_is_repeated_in_deterministic_mode(tmp_path: Path) -> None:
    (found,) = graded(sample(str(tmp_path / "mark")), custom_rm_path=f"{HERE}.fails_once", deterministic_mode=True)
    assert (found.reward, found.grading) == (1.0, "")
    (found,) = graded(sample(str(tmp_path / "mark2")), custom_rm_path=f"{HERE}.fails_once")
    assert (found.reward, found.grading) == (0.0, "error")


def test_a_hostile_integral_is_stopped() -> None:
    text = r"\boxed{\int_0^1 x^{9999999} e^{x^2} \sin(x)dx}"
    bad, good = graded(
        sample(text, "1/2"), sample(r"\boxed{\sum_{k=1}^4 k}", "10"), rm_type="math", reward_cpu_limit=2.0
    )
    assert bad.reward == 0.0 and good.reward == 1.0


def test_a_process_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone([int(done.stdout)], 60)


def test_cancelled_grading() -> None:
    """The answer of a cancelled grading is discarded."""

    async def body(grading: Grading) -> list[Sample]:
        slow = asyncio.create_task(grade(grading, sample("slow")))
        await asyncio.sleep(0.3)
        slow.cancel()
        return await grade(grading, *(sample(str(n) * n, response_index=n) for n in range(1, 5)))

    assert [s.reward for s in run(body, custom_rm_path=f"{HERE}.slow_length")] == [1.0, 2.0, 3.0, 4.0]


# ---- too many failures


def test_too_many_failures_stop_the_run() -> None:
    """Failures of several prompts beyond the allowed share stop the run."""

    async def body(grading: Grading) -> None:
        for number in range(20):
            await grade(grading, sample("bad"), size=20, where=f"p.jsonl, line {number % 3}")

    with pytest.raises(CodeError, match=r"^reward \S+ raised KeyError: 'answer' \(own_rewards.py:\d+ in ") as caught:
        run(body, custom_rm_path=f"{HERE}.raises", reward_max_failed=0.2)
    for words in (
        "5 of the 20 gradings of rollout 0",
        "--reward-max-failed 0.2",
        "KeyError: 'answer'",
        "own_rewards.py:",
        "p.jsonl, line 1",
    ):
        assert words in str(caught.value)


def test_one_bad_prompt_never_stops_a_run() -> None:
    prompts: set[str] = set()
    for rollout in range(3):
        tally = Tally(f"rollout {rollout}", 8, 8, 0.1, prompts)
        for _ in range(8):
            tally.fail("p.jsonl, line 9", "it raised")
    with pytest.raises(HpcrlError, match="1 of the 8 gradings"):
        Tally("rollout 3", 8, 8, 0.1, prompts).fail("p.jsonl, line 10", "it raised")
    with pytest.raises(HpcrlError):
        Tally("rollout 0", 8, 8, 0.0, set()).fail("p.jsonl, line 9", "it raised")
    with pytest.raises(HpcrlError, match="9 of the 8 gradings"):  # its groups are made again, and would be for ever
        Tally("rollout 0", 8, 8, 0.1, set(), failed=8).fail("p.jsonl, line 9", "it raised")


def test_a_service_that_fails_is_no_mistake() -> None:
    """Nor is the last error, of an answer that a busy service gave."""
    tally = Tally("rollout 0", 8, 8, 0.3, set())
    for number in range(2):
        tally.fail(f"p.jsonl, line {number}", "it timed out")
    with pytest.raises(HpcrlError) as caught:
        tally.fail("p.jsonl, line 2", "it raised KeyError", mistake=True)
    assert type(caught.value) is HpcrlError


# ---- what is refused at the start


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("reward", "is not a module.function"),
        ("no_such_module.reward", "imported: No module named 'no_such_module'; modules are looked"),
        (f"{HERE}.absent", "no absent; it has"),
        (f"{HERE}.NOT_A_FUNCTION", "not a function but 3"),
        (
            f"{HERE}.no_arguments",
            "takes (): too many positional arguments",
        ),
        (f"{HERE}.too_many_arguments", "missing a required argument"),
        (f"{HERE}.of_trl", "TRL's form"),
        (f"{HERE}.of_verl", "verl's form"),
        (
            "tests.support.breakable.reward_module.reward",
            "importing tests.support.breakable.reward_module raises ZeroDivisionError",
        ),
    ],
)
def test_an_own_reward_that_cannot_be_used_is_named(path: str, words: str) -> None:
    for values, shown in (
        ({"custom_rm_path": path}, f"--custom-rm-path {path}"),
        ({"rm_type": path}, f"--rm-type {path}"),
    ):
        if path == "reward" and "rm_type" in values:
            continue
        with pytest.raises(UsageError) as caught:
            graded(sample("x"), **values)
        assert shown in str(caught.value) and words in str(caught.value), str(caught.value)


def test_no_reward_is_an_error() -> None:
    with pytest.raises(UsageError, match="--rm-type or --custom-rm-path"):
        Grading(Options())


def test_processes_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rollout.worker_pool.sys.executable", "/bin/false")
    with pytest.raises(HpcrlError, match="grades with math.*exit status 1"):
        graded(sample("x"), rm_type="math")


def test_an_import_that_never_ends_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "START", 1.0)
    with pytest.raises(HpcrlError, match="was not ready within 1 s"):
        graded(sample("x"), custom_rm_path="tests.support.breakable.reward_never_imported.reward")


def test_a_lost_sandbox_costs_no_reward() -> None:
    """It is graded again; what is lost three times in a row failed."""
    name = f"{HERE}.loses_its_sandbox"
    (found,) = graded(sample("x"), custom_rm_path=name, reward_max_failed=0.0)
    assert (found.reward, found.grading) == (3.0, "")
    (bad,) = graded(sample("never"), custom_rm_path=name)
    assert (bad.reward, bad.grading) == (0.0, "error") and "the box has ended" in bad.grading_error


@needs("namespaces")
def test_sandboxes_of_rewards_are_counted() -> None:
    """With what failed in them, and only once."""

    async def body(grading: Grading) -> tuple[list[Sample], dict[str, float]]:
        found = await grade(grading, sample("exit 3"), sample("exit 4"), sample("yes | head -c 2000000"))
        return found, dict(grading.pool.sandboxes.done)

    found, done = run(body, custom_rm_path=f"{HERE}.in_a_sandbox")
    assert [one.reward for one in found] == [3.0, 4.0, 0.0]
    assert (done["handed_out"], done["output"]) == (3, 1) and done["seconds"] > 0 and "lost" not in done
