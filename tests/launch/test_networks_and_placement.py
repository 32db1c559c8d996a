"""Which network, which host, which rank, which files: the pure parts of a run over many machines."""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.launch.attempts.progress import FRUITLESS, check_headway
from hpcrl.launch.mpi.mpirun import handed_on, mpi_command
from hpcrl.launch.mpi.placement import place_ranks
from hpcrl.launch.mpi.ssh_check import check_hosts, unreachable
from hpcrl.launch.probe import HostReport, Network, choose, gather, host_report, write
from hpcrl.launch.requeue import margin
from hpcrl.launch.roles import commands
from hpcrl.launch.slurm.srun import SrunHosts
from hpcrl.launch.slurm.steps import HetGroup, read_groups, step_on
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.launch.time_limit import TimeLimitWatcher
from hpcrl.plan import Host, make_plan
from hpcrl.run.rundir import RunDir


def machine(name: str, gpus: int = 8, **networks: str) -> HostReport:
    """networks: interface=address/prefix."""
    found = [Network(i.rstrip("_"), a.split("/")[0], int(a.split("/")[1]), 0) for i, a in networks.items()]
    return HostReport(name, name, tuple(found), True, 0.0, 8, 10**9, gpus)


# ---- networks


def test_the_one_network_that_all_share_is_taken() -> None:
    hosts = {
        "a": machine("a", eth0="10.0.0.1/24", usb0="192.168.1.5/24", docker0="172.17.0.1/16"),
        "b": machine("b", eth1="10.0.0.2/24", docker0="172.17.0.1/16"),
    }
    assert {h: (n.interface, n.address) for h, n in choose(hosts).items()} == {
        "a": ("eth0", "10.0.0.1"),
        "b": ("eth1", "10.0.0.2"),
    }


def test_one_host_alone_stays_on_its_loopback() -> None:
    assert choose({"a": machine("a", eth0="10.0.0.1/24")})["a"].address == "127.0.0.1"


def test_racks_with_their_own_subnets() -> None:
    """Racks with subnets of their own are matched by the name of the interface."""
    hosts = {"a": machine("a", ib0="10.1.0.1/24"), "b": machine("b", ib0="10.2.0.1/24")}
    assert choose(hosts)["b"].address == "10.2.0.1"


def test_two_networks_or_none_are_for_the_user() -> None:
    two = {n: machine(n, eth0=f"10.0.0.{i}/24", ib0=f"10.9.0.{i}/16") for i, n in enumerate("ab", 1)}
    with pytest.raises(
        UsageError, match=r"share 2 networks, on a: eth0 \(10.0.0.0/24\), ib0 \(10.9.0.0/16\); .*--interface"
    ):
        choose(two)
    assert choose(two, "ib")["a"].address == "10.9.0.1"
    with pytest.raises(UsageError, match="no interfaces fit hsn;.*eth0, ib0"):
        choose(two, "hsn")
    with pytest.raises(UsageError, match="share no network:.*eth0 10.0.0.1; b has none"):
        choose({"a": machine("a", eth0="10.0.0.1/24"), "b": machine("b")})


def test_a_host_reports_addresses_that_it_really_has(tmp_path: Path) -> None:
    here = host_report("x", tmp_path / "nothing")
    assert not here.sees and here.cpus > 0 and abs(here.time - time.time()) < 5
    assert all(not n.address.startswith("127.") for n in here.networks)


def test_hosts_that_do_not_answer_are_named(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    write(rundir, "a")
    assert list(gather(rundir, ["a"], 1)) == ["a"]
    assert list(gather(rundir, ["a", "b"], 0, lacks=1)) == ["a"]
    with pytest.raises(DeadlineError, match="from b, c within 0 s"):
        gather(rundir, ["a", "b", "c"], 0)


# ---- MPI ranks


def test_roles_follow_the_hostfile() -> None:
    """Roles follow the hostfile and not the order of ranks."""
    reports = [machine("a.site", eth0="10.0.0.1/24"), machine("b", eth0="10.0.0.2/24")]
    crew = place_ranks(reports, [Host("10.0.0.2", 4), Host("a", 2)])
    assert [(h.name, h.slots) for h in crew.hosts] == [("10.0.0.2", 4), ("a", 2)]
    assert crew.names == ("a", "10.0.0.2")
    reports = [machine("n1.b.edu", gpus=4), machine("n1.a.edu", gpus=2)]
    assert place_ranks(reports, [Host("n1.a.edu", 1), Host("n1.b.edu", 1)]).names == ("n1.b.edu", "n1.a.edu")
    assert place_ranks(reports, None).hosts == (Host("n1.b.edu", 4), Host("n1.a.edu", 2))


@pytest.mark.parametrize(
    ("machines", "gpus", "hosts", "said"),
    [
        (
            "ab",
            [8, 8],
            [Host("a", 1), Host("c", 1)],
            "hostfile runs no MPI",
        ),
        ("ab", [8, 8], [Host("a", 1)], "not in the hostfile"),
        (
            "ab",
            [8, 8],
            [Host("a", 1), Host("10.0.0.1", 1), Host("b", 1)],
            "a and 10.0.0.1.*hostfile are the same",
        ),
        ("baa", [8, 8, 8], None, "host a has 2 MPI ranks"),
        ("ab", [8, 0], None, "b shows no GPU"),
    ],
)
def test_ranks_that_do_not_fit_the_hostfile(
    machines: str, gpus: list[int], hosts: list[Host] | None, said: str
) -> None:
    reports = [machine(n, count, eth0=f"10.0.0.{ord(n) - 96}/24") for n, count in zip(machines, gpus, strict=True)]
    with pytest.raises(UsageError, match=said):
        place_ranks(reports, hosts)


def test_each_launcher_gets_its_own_words() -> None:
    ours = mpi_command(["mpirun"], "openmpi", Path("H"), 2, "ssh", ["p"])
    assert ours == "mpirun --hostfile H -np 2 --map-by ppr:1:node --bind-to none p".split()
    ours = mpi_command(["mpirun"], "openmpi", Path("H"), 4, "ssh -p 2", ["p"])
    assert ours == [
        *"mpirun --hostfile H -np 4 --map-by ppr:1:node --bind-to none --mca plm_rsh_agent".split(),
        "ssh -p 2",
        "p",
    ]
    ours = mpi_command(["mpiexec"], "mpich", Path("H"), 2, "/x/ssh -p 2", ["p"])
    assert ours == "mpiexec -machinefile H -n 2 -bind-to none -launcher ssh -launcher-exec /x/ssh p".split()


def test_hosts_are_tried_before_mpirun(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/bash\n[ "$1" = good ] || { echo "no route to $1" >&2; exit 255; }\n')
    agent.chmod(0o755)
    check_hosts(["good"], [str(agent)])
    with pytest.raises(UsageError, match="bad cannot be reached:.*agent bad true"):
        check_hosts(["good", "bad"], [str(agent)])
    with pytest.raises(UsageError, match="host localhost is .* other hosts cannot reach"):
        check_hosts(["good", "localhost"], [str(agent)])


def test_slow_shell_and_silent_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what OpenSSH 9 says at LogLevel VERBOSE; the cluster's tests do it with a real one."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        """#!/bin/bash
[[ " $* " == *" LogLevel=VERBOSE "* ]] || exit 1
case ${@: -2:1} in
    far) exec sleep 60;;
    slow) echo "Authenticated to slow ([10.0.0.1]:22) using \"publickey\"." >&2; exec sleep 60;;
    full) printf 'Authenticated to full.\nfull: no space left\nTransferred: sent 1, received 2 bytes\nBytes per second: 3\n' >&2; exit 1;;
    good) echo "Authenticated to good." >&2;;
esac
"""
    )
    ssh.chmod(0o755)
    monkeypatch.setattr("hpcrl.launch.mpi.ssh_check.REACH", 5.0)
    found = unreachable(["far", "slow", "full", "good"], [str(ssh)])
    assert found.pop("slow").startswith("accepts the connection, but its shell was not ready within 5 s: ")
    assert found == {"far": "does not answer within 5 s", "full": "cannot be reached: full: no space left"}
    with pytest.raises(
        UsageError, match=r"^host slow accepts the connection,.*; let its start-up file.*try: \S*ssh slow true"
    ):
        check_hosts(["slow"], [str(ssh)])


# ---- who starts what


def test_every_process_of_a_plan_is_started_once(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    o = Options(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    plan = make_plan(o, [Host(n, 4) for n in "ab"], "r")
    others = [("engine", 0), ("engine", 1), ("rollout", 0)]
    by_host = [(role, i) for host in plan.hosts for role, i, _ in commands(o, plan, rundir, host)]
    assert sorted(by_host) == sorted([*others, ("trainer", 0), ("trainer", 2)]), "a torchrun on each host"
    by_slot = [(role, i) for host in plan.hosts for s in range(4) for role, i, _ in commands(o, plan, rundir, host, s)]
    assert sorted(by_slot) == sorted([*others, *(("trainer", rank) for rank in range(4))])
    alone = o.model_copy(update={"actor_num_nodes": 1, "actor_num_gpus_per_node": 1})
    plan = make_plan(alone, [Host(n, 4) for n in "ab"], "r")
    words = [
        words for host in plan.hosts for role, _, words in commands(alone, plan, rundir, host) if role == "trainer"
    ]
    assert len(words) == 1 and "hpcrl.trainer.start.single_rank" in words[0], "one rank needs no agent"


# ---- inside a Slurm job


def test_groups_come_from_slurms_node_lists() -> None:
    env = {
        "SLURM_JOB_ID": "1", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[01-02,07]", "SLURM_JOB_NODELIST_HET_GROUP_1": "g3",
        "HPCRL_STEP_0": "srun --het-group=0 bash 'a b'", "HPCRL_SLOTS_0": "8", "HPCRL_STEP_1": "srun", "HPCRL_SLOTS_1": "0",
    }  # fmt: skip
    first, second = read_groups(env)
    assert first.nodes == ("n01", "n02", "n07") and first.step == ("srun", "--het-group=0", "bash", "a b")
    assert second.nodes == ("g3",) and second.slots == 0
    with pytest.raises(UsageError, match="HPCRL_SLOTS_1"):
        read_groups({k: v for k, v in env.items() if k != "HPCRL_SLOTS_1"})
    with pytest.raises(UsageError, match="not inside a Slurm"):
        read_groups({})


def test_one_node_can_be_asked_alone() -> None:
    step = ("srun", "--nodes=3", "bash", "task.sh")
    assert step_on(step, "n2") == [
        "srun",
        "--nodes=3",
        "--nodelist=n2",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "bash",
        "task.sh",
    ]


def fake_srun(folder: Path, dead: tuple[str, ...]) -> tuple[str, ...]:
    """An srun for three nodes that notes each call; a node of `dead` starts nothing."""
    script = folder / "srun"
    script.write_text(
        f"""#!/bin/bash
echo "$@" >> {folder}/calls
only=$(printf '%s\\n' "$@" | sed -n 's/--nodelist=//p')
for node in ${{only:-n1 n2 n3}}; do
    case " {" ".join(dead)} " in *" $node "*) [ -z "$only" ] || exit 1; continue;; esac
    [ "${{@: -2:1}}" != answer ] || : > "${{@: -1}}/$node"
done
"""
    )
    script.chmod(0o755)
    return (str(script), "--nodes=3", "task.sh")


@pytest.mark.parametrize(("dead", "calls"), [((), 1), (("n2",), 2), (("n1", "n2", "n3"), 4)])
def test_silent_hosts_are_probed_again(tmp_path: Path, dead: tuple[str, ...], calls: int) -> None:
    """Hosts are probed by one srun, and silent ones once more."""
    hosts = SrunHosts([HetGroup(("n1", "n2", "n3"), 1, fake_srun(tmp_path, dead))])
    hosts.answers = tmp_path
    assert hosts.silent(10) == list(dead)
    assert len((tmp_path / "calls").read_text().splitlines()) == calls


def metrics(rundir: RunDir, steps: list[float], save: float) -> None:
    rows = [{"rollout_id": i, "perf/step_time": s} for i, s in enumerate(steps)] + [
        {"rollout_id": 0, "perf/save_time": save}
    ]
    rundir.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_time_for_saving(tmp_path: Path) -> None:
    """The time kept for saving follows the measured steps and saves."""
    rundir = RunDir.create(tmp_path / "run")
    assert margin(rundir, 60) == 60
    metrics(rundir, [100.0] * 5 + [2000.0], 300.0)
    assert margin(rundir, 60) == 2 * 100 + 300 + 15  # one slow step is not the rule
    assert margin(rundir, 600) == 600


def test_clock_asks_once(tmp_path: Path) -> None:
    """The time limit is asked for once, and an early signal only wakes the clock."""
    rundir = RunDir.create(tmp_path / "run")
    ends = {"at": time.time() + 1000}
    limit = lambda: ends["at"]  # noqa: E731
    clock, stop = TimeLimitWatcher(limit, 60), StopRequest()
    stop.nudges = 1
    clock.watch(stop, rundir)
    assert (stop.requests, stop.nudges, clock.due) == (0, 0, False)
    ends["at"] = time.time() + 30  # the limit was changed, and the scheduler says so
    stop.nudges = 1
    clock.watch(stop, rundir)
    assert (stop.requests, clock.due, stop.why) == (1, True, "the time limit is near")
    assert 14 < stop.seconds <= 15, (
        "half of what is left: whoever takes longer is ended, and queued again, before the limit"
    )
    ends["at"] = time.time() + 55
    long, stop = TimeLimitWatcher(limit, 60), StopRequest()
    long.watch(stop, rundir)
    assert 34 < stop.seconds <= 35, "a step longer than --stop-timeout has as long as the limit leaves"
    ends["at"] = None
    blind, stop = TimeLimitWatcher(limit, 60), StopRequest()
    blind.watch(stop, rundir)
    assert not stop.requests
    stop.nudges = 1
    blind.watch(stop, rundir)
    assert stop.requests and blind.due and stop.seconds == 60
    stopped = StopRequest()
    stopped.request_stop("hpcrl stop")
    late = TimeLimitWatcher(limit, 60)
    late.ends = time.time() - 1
    late.next_look = 0
    late.watch(stopped, rundir)
    assert not late.due  # the user's stop is not the time limit's: no requeue


@pytest.mark.parametrize("left", [b"", b"[[", b"{}", b"\xff"])
def test_unreadable_restart_count(tmp_path: Path, capsys: pytest.CaptureFixture[str], left: bytes) -> None:
    """A count of restarts that cannot be read begins again and is reported once."""
    file = tmp_path / "headway.json"
    file.write_bytes(left)
    check_headway(tmp_path, 3)
    assert "headway.json cannot be read" in capsys.readouterr().err
    for restart in range(4, 3 + FRUITLESS):
        check_headway(tmp_path, restart)
    with pytest.raises(HpcrlError, match="5 restarts without a new"):
        check_headway(tmp_path, 9)
    assert capsys.readouterr().err == ""


def test_raised_limit_and_known_limit(tmp_path: Path) -> None:
    """A raised limit is honoured, and a known one is kept."""
    rundir = RunDir.create(tmp_path / "run")
    answers: list[float | None] = [time.time() + 30, time.time() + 1700]
    raised, stop = TimeLimitWatcher(lambda: answers.pop(0), 60), StopRequest()
    raised.watch(stop, rundir)  # 30 s are left, as far as it knows: it asks before it decides
    assert not stop.requests and not raised.due and not answers
    unreachable = TimeLimitWatcher(lambda: None, 60, ends=None)
    stop = StopRequest()
    unreachable.ends = time.time() + 800
    stop.nudges = 1
    unreachable.watch(stop, rundir)
    assert not stop.requests, "a signal while the scheduler does not answer: the end that was known holds"
    unreachable.ends = time.time() + 30
    unreachable.next_look = 0
    unreachable.watch(stop, rundir)
    assert stop.requests and unreachable.due


def test_preemption_with_grace_time(tmp_path: Path) -> None:
    """A preemption with a grace time is reported as one."""
    rundir = RunDir.create(tmp_path / "run")
    for preempted, said in ((True, "preempted, the grace time is running"), (False, "the time limit is near")):
        clock = TimeLimitWatcher(lambda: time.time() + 30, 60, lambda answer=preempted: answer)
        stop = StopRequest()
        stop.nudges = 1
        clock.watch(stop, rundir)
        assert stop.requests and clock.due and stop.why == said


def test_every_host_gets_network_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that is a host's own, or that a command line must not show."""
    given = {
        "NCCL_IB_HCA": "mlx5_0",
        "UCX_TLS": "rc",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "FI_PROVIDER": "cxi",
        "HF_HOME": "/hf",
    }
    kept_back = {"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "secret", "VLLM_API_KEY": "secret", "HOSTNAME": "here"}
    for name, value in {**given, **kept_back}.items():
        monkeypatch.setenv(name, value)
    program, *words = handed_on("")
    names = {word.partition("=")[0] for word in words}
    assert program == "env" and {f"{name}={value}" for name, value in given.items()} <= set(words)
    assert "HPCRL_PYTHON" in names and not names & set(kept_back)


def test_restart_count_is_written_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Limited to no byte, as a full disk is: what was there stays."""
    check_headway(tmp_path, 0)
    before = (tmp_path / "headway.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        check_headway(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "headway.json").read_bytes() == before
    assert "cannot write" in capsys.readouterr().err


def test_restarts_without_a_checkpoint_end(tmp_path: Path) -> None:
    """Restarts without a new checkpoint come to an end."""
    tracker = tmp_path / "grpo/checkpoints/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("4")
    check_headway(tmp_path, 0)
    for restart in range(1, FRUITLESS):
        check_headway(tmp_path, restart)
    tracker.write_text("6")
    for restart in range(FRUITLESS, 2 * FRUITLESS):
        check_headway(tmp_path, restart)
    with pytest.raises(HpcrlError, match="5 restarts without a new checkpoint.*hpcrl resume"):
        check_headway(tmp_path, 9)
    check_headway(tmp_path, 0)  # by hand: the count begins anew
    assert msgspec.json.decode((tmp_path / "headway.json").read_bytes())[0][0].endswith("iteration.txt 6")
