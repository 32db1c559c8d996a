"""The self-test's own parts: what is wrong is told as a failure, what cannot be checked is skipped with its reason."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import Popen, run
from typing import Any

import msgspec
import pytest

from hpcrl.cli.main import main
from hpcrl.doctor.selftest.checks import ipc, sleep_wake
from hpcrl.doctor.selftest.checks.bandwidth import nvlink
from hpcrl.doctor.selftest.registry import (
    Check,
    CheckContext,
    Outcome,
    Results,
    Skip,
    choose_checks,
    find_checks,
    report,
    table,
    try_check,
)
from hpcrl.doctor.selftest.this_host import watch
from hpcrl.errors import HpcrlError
from hpcrl.weights.pieces.device_memory import HostMemory


def fake(work: Any, *needs: str) -> Check:
    return Check("it holds", 1, "launcher", work, needs)


def raises(error: Exception) -> Any:
    def work(_: object) -> Outcome:
        raise error

    return work


@pytest.mark.parametrize(
    ("check", "result", "said"),
    [
        (fake(lambda _: Outcome("passed", "well")), "passed", "well"),
        (fake(raises(Skip("no GPU"))), "skipped", "no GPU"),
        (fake(raises(HpcrlError("broken", "mend it"))), "failed", "broken; mend it"),
        (fake(raises(ZeroDivisionError("division by zero"))), "failed", "ZeroDivisionError: division by zero"),
        (fake(raises(ValueError())), "failed", "ValueError: "),
        (fake(raises(ValueError()), "json", "no_such_module"), "skipped", "no_such_module is not installed"),
    ],
)
def test_whatever_a_check_does_is_an_outcome(check: Check, result: str, said: str) -> None:
    found = try_check(check, None)
    assert (found.result, found.text) == (result, said)


def test_every_check_is_described() -> None:
    """Every check has a place in the order and a sentence."""
    every = find_checks()
    assert len({check.turn for check in every.values()}) == len(every) >= 10
    assert all(len(check.title) > 20 for check in every.values())


def test_engine_checks_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM, the engine's checks are skipped by name."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else object())
    outcomes = {
        name: try_check(replace(check, work=lambda _: Outcome("passed", "")), None)
        for name, check in find_checks().items()
    }
    skipped = {name: found.text for name, found in outcomes.items() if found.result == "skipped"}
    with_engines = ("sleep_wake", "engine_update", "large_update", "engine_logprobs", "engine_loss", "qwen3_rates")
    assert skipped == dict.fromkeys([*with_engines, "moe_fp8"], "vllm is not installed")


def test_what_a_sleeping_engine_may_keep() -> None:
    """No more than `hpcrl plan` counts with, and once awake no more than before."""

    def of(awake: float, asleep: float, again: float) -> Outcome:
        gib = {"awake": awake, "asleep": asleep, "weights": 20.0, "awake_again": again}
        return sleep_wake.judge({f"{name}_bytes": int(value * 2**30) for name, value in gib.items()})

    assert of(40, 1.5, 40.5).result == "passed"
    assert of(40, 2.5, 40).text.endswith("GiB: hpcrl plan allows 2 GiB to one that sleeps")
    assert of(40, 1.5, 41.5).text.endswith("GiB: more than before it slept")


def test_check_that_ended_its_process(tmp_path: Path) -> None:
    """A check that ended its process is named."""
    results = Results(tmp_path)
    results.start_check("devices")
    results.write("devices", Outcome("passed", "x", {"n": 1}, 2.0))
    results.start_check("collectives")
    assert results.interrupted(["devices", "collectives", "bandwidth"]) == "collectives"
    log = tmp_path / "logs" / "rank-0.log"
    log.write_text("ncclSystemError: x\n")
    told: list[str] = []
    why = watch([(Popen([sys.executable, "-c", "raise SystemExit(9)"]), log)], ["devices"], results, told.append, 20)
    assert "exit code 9: ncclSystemError: x" in why
    late = watch([(Popen(["sleep", "60"]), log)], ["devices"], results, told.append, 0.2)
    assert late.startswith("it did not end within 0 s")
    results.clear(["collectives"])
    assert results.interrupted(["collectives"]) is None


def test_report_lists_skipped_and_versions(tmp_path: Path) -> None:
    """The report lists what was not run, and the versions."""
    every = choose_checks(["devices", "repeat"], find_checks())
    found = {"devices": Outcome("failed", "memory", {"n": 1}, 2.4)}
    assert table(every, found).splitlines() == [
        "failed   devices          memory (2 s)",
        "not run  repeat",
        "0 passed, 1 failed, 0 skipped",
    ]
    told = json.loads(report(every, found, ["n1"], {"run": ["Using X backend"]}))
    assert told["checks"]["repeat"]["result"] == "not run" and told["checks"]["devices"]["numbers"] == {"n": 1}
    assert told["hosts"] == ["n1"] and "torch" in told["packages"] and told["kernels"] == {"run": ["Using X backend"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nccl"], "is no such check"),
        (["--hosts", "2"], "--hosts has no effect without --site"),
        (["--resume", "/nowhere"], "there is no self-test"),
        (["--resume", "x", "--dir", "y"], "--dir and --resume exclude each other"),
        (["--first-hour", "--only", "ipc"], "--first-hour and --only exclude each other"),
        (["recipe.toml"], "recipe.toml has no effect"),
        (["--lr", "1"], "--lr has no effect"),
    ],
)
def test_words_without_effect_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_full_directory_is_no_new_self_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").touch()
    assert main(["selftest", "--dir", str(tmp_path)]) == 2
    assert "hpcrl selftest --resume" in capsys.readouterr().err


def test_nvlink_is_summed_over_the_first_gpus_links() -> None:
    text = (
        "GPU 0: NVIDIA H100 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\nGPU 1: NVIDIA H100\n\t Link 0: "
        "26.562 GB/s\n"
    )
    assert nvlink(text) == pytest.approx(53.124e9)
    assert nvlink("GPU 0: x\n\t Link 0: <inactive>\n") is None and nvlink("") is None


@pytest.mark.process
def test_buffer_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's own two processes, in the host's memory; then with a buffer that is not written anew."""
    import torch

    with pytest.raises(Skip, match="no GPU"):
        ipc.work(CheckContext(0, 1, torch.device("cpu"), Path("/")))
    found = ipc.hand_over(torch.device("cpu"), 1 << 20)
    assert found.result == "passed" and "1 MiB read 5 times" in found.text
    assert found.numbers["bytes_per_second"] > 1e6 < found.numbers["own_copy_bytes_per_second"]
    plain = ipc.pattern
    monkeypatch.setattr(ipc, "pattern", lambda turn, size, device: plain(0, size, device))
    stale = ipc.hand_over(torch.device("cpu"), 1 << 20)
    assert (stale.result, stale.numbers) == ("failed", {"turn": 1})
    monkeypatch.setattr(ipc, "TURNS", 0)
    monkeypatch.setattr(HostMemory, "name", lambda self, block: b"\x01" * 64)
    broken = try_check(fake(lambda _: ipc.hand_over(torch.device("cpu"), 1 << 20)), None)
    assert broken.result == "failed" and "the other process: " in broken.text


# ---- on ranks


def collectives_with(broken: str) -> str:
    """What the check says where one collective gives one wrong value on rank 1."""
    import torch
    import torch.distributed as dist

    from hpcrl.doctor.selftest.checks import collectives
    from hpcrl.doctor.selftest.registry import CheckContext

    dist.init_process_group("gloo")
    plain = getattr(dist, broken)

    def wrong(out: torch.Tensor, *args: Any, **more: Any) -> Any:
        done = plain(out, *args, **more)
        if dist.get_rank() == 1:
            out.view(-1)[-1] += 1
        return done

    setattr(dist, broken, wrong)
    try:
        return collectives.work(CheckContext(dist.get_rank(), 3, torch.device("cpu"), Path("/"))).text
    finally:
        setattr(dist, broken, plain)
        dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.parametrize(
    ("broken", "name"),
    [("all_reduce", "all-reduce"), ("all_gather_into_tensor", "all-gather"), ("all_to_all_single", "all-to-all")],
)
def test_one_wrong_value_of_a_collective_is_found(broken: str, name: str) -> None:
    from tests.support.ranks import run_ranks

    said = run_ranks(3, collectives_with, broken)
    assert said[1].startswith(f"rank 1: {name} of 1002 floats gives wrong values (round 0)")
    assert said[0] == said[2] == "6 collectives over 3 ranks, 4 times, every value right"


@pytest.mark.process
def test_checks_over_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of this machine play two hosts of a job."""
    from hpcrl.doctor.selftest import job

    Results(tmp_path)
    only = ["collectives", "stream_order"]
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job.SelftestJob(2, 1, only, "lo")))
    each = f'for i in 1 2; do "{sys.executable}" -m hpcrl.doctor.selftest.job "$2" --host node$i & done; wait'
    step = f'if [ "$1" = selftest ]; then {each}; else shift; exec "$@"; fi'
    monkeypatch.setenv("HPCRL_STEP_0", shlex.join(["bash", "-c", step, "bash"]))
    monkeypatch.setenv("HPCRL_PYTHON", sys.executable)
    assert (
        run([sys.executable, "-m", "hpcrl.doctor.selftest.job", str(tmp_path)], timeout=300).returncode == 0
    )  # it ends its descendants
    found = Results(tmp_path)
    assert {name: outcome.result for name, outcome in found.read().items()} == {
        "collectives": "passed",
        "stream_order": "skipped",
    }
    assert found.read()["collectives"].numbers == {"ranks": 2} and found.hosts() == ["node1", "node2"]
    assert (tmp_path / "ended").exists()
