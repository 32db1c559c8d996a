"""The hosts of a Slurm job, from its batch process: srun starts one task on each of them, which starts that host's
roles.

Invariant: hosts and their order come from Slurm's node lists; a host that does not answer is named.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempts.attempt import HostsSilent
from hpcrl.launch.attempts.excluded_hosts import leave_out
from hpcrl.launch.attempts.host_processes import HostProcess
from hpcrl.launch.attempts.spare_hosts import in_order, replacement, without
from hpcrl.launch.broken_hosts import BROKEN, broken_hosts
from hpcrl.launch.local import spawn
from hpcrl.launch.node_checks.all_nodes import NodesJob, NodeStep, examine
from hpcrl.launch.slurm import squeue
from hpcrl.launch.slurm.squeue import ECHOES, REFUSED
from hpcrl.launch.slurm.steps import KEPT, HetGroup, Step, step_on, without_container
from hpcrl.launch.standalone_engine import elsewhere
from hpcrl.plan import Host, Plan
from hpcrl.report.file_tail import last_lines
from hpcrl.report.progress import say
from hpcrl.run.heartbeat import LEAST
from hpcrl.run.job_files import BEAT, CANCEL, OVER, STATE, STOP
from hpcrl.run.process import CommandResult
from hpcrl.run.role import launch_timeout
from hpcrl.run.rundir import RunDir, listed
from hpcrl.utils.waiting import Deadline, Pauses

ABREAST = 16  #: hosts that are asked alone at once
MORE = 5.0  #: seconds that each such set gets at least
#: Run on another node than the launcher's, where srun has --no-kill: Slurm lets such a job live when the node of its
#: batch process is lost, and the others would wait for nothing until the time limit.  Once state.json has not changed
#: for SILENCE seconds, and Slurm says that the job does not have that node any more, the job is queued again (AGAIN 1)
#: or cancelled.  What Slurm does not answer, or refuses only for now, is asked again.
#: Arguments: JOB RUN SILENCE AGAIN.
ORPHANED = rf"""
job=$1 run=$2 silence=$3 again=$4 seen= quiet=0
while sleep 10; do
    grep -qE '"phase": ?"({"|".join(OVER)})"' "$run/state.json" 2> /dev/null && exit
    now=$(stat -c '%i %y' "$run/state.json" 2> /dev/null)
    if [ "$now" != "$seen" ]; then seen=$now quiet=0; continue; fi
    quiet=$((quiet + 10))
    [ "$quiet" -ge "$silence" ] || continue
    quiet=$((silence - 30))
    record=$(timeout 30 scontrol --oneliner show job "$job" 2>&1)
    [ $? = 0 ] || case $record in *nvalid\ job\ id*) exit 0 ;; *) continue ;; esac
    record=${{record%%$'\n'*}}
    case $record in *" JobState=RUNNING "* | *" JobState=SUSPENDED "* | *" JobState=STOPPED "*) ;; *) exit ;; esac
    case $record in *" NodeList="*" BatchHost="*) ;; *) continue ;; esac
    batch=${{record#* BatchHost=}} nodes=${{record#* NodeList=}}
    left=$(timeout 30 scontrol show hostnames "${{nodes%% *}}") || continue
    grep -qxF "${{batch%% *}}" <<< "$left" && continue
    echo "host ${{batch%% *}}, the launcher's, was lost"
    if [ "$again" = 1 ] && [ ! -e "$run/{STOP}" ] && [ ! -e "$run/{CANCEL}" ]; then
        said=$(timeout 30 scontrol requeue "$job" 2>&1) && exit
        echo "$said"
        grep -qiE '{"|".join(REFUSED)}' <<< "$said" || continue
    fi
    scancel "$job" && exit
done
"""


class SrunHosts:
    """The hosts of this job, reached with srun.

    Args:
        job_id: of the job, with which its loss of the launcher's node is noticed; "" for one that ends with that.
        again: whether the job may be queued again then.
    """

    def __init__(self, groups: list[HetGroup], job_id: str = "", again: bool = False) -> None:
        self.groups = groups
        self._every = [Host(node, g.slots, spare=node in g.spares) for g in groups for node in g.nodes]
        self.left_out: list[str] = []
        self._job_id, self._again = job_id, again
        self._guard: subprocess.Popen[bytes] | None = None
        self._guarded: tuple[Options, RunDir] | None = None  #: with what it was started
        self._guard_node = ""
        # this process's interpreter is not in the site's container; task.sh goes by the same variable
        self.python = os.environ.get("HPCRL_PYTHON") or sys.executable
        self.examined = False
        self.answers: Path | None = None  #: a directory that all hosts see, once there is one

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return sum(len(group.nodes) for group in self.groups)

    @property
    def names(self) -> list[str]:
        """The hosts, in order."""
        return [node for group in self.groups for node in group.nodes]

    def nodes(self) -> list[Host]:
        """The hosts with their slots, without addresses."""
        return without(self._every, self.left_out)

    def leave_out(self, hosts: Sequence[str]) -> None:
        self.left_out += hosts
        left = [group.without(hosts) for group in self.groups]
        self.groups = [group for group in left if group.nodes]
        if self._guarded is not None:
            self._watch_launcher(*self._guarded)

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        """Every host's own report first; then the network that all of them share."""
        self._watch_launcher(options, rundir)
        self._replace(self._known_broken(rundir), f"{BROKEN} names", rundir)
        names = self.names
        self.answers = rundir.here
        log = rundir.logs / "probe.log"
        steps = [spawn(self._step(group, "probe", rundir), log) for group in self.groups]
        lacks = sum(host.spare for host in self.nodes())
        ended = lambda: all(step.poll() is not None for step in steps)  # noqa: E731
        early = ended if lacks else lambda: _check_started(steps, log)
        try:
            reports = probe.gather(rundir, names, launch_timeout(), early, lacks)
            silent = [name for name in names if name not in reports]
            if left := self._replace(silent, "no answer from", rundir):
                raise DeadlineError(f"no answer from {', '.join(left)}", "no spare host has as many slots.")
        except DeadlineError as error:
            raise HostsSilent(error.what, f"{error.hint} See {log}") from None
        finally:
            for step in steps:
                step.terminate()
        network = probe.choose(reports, options.interface, apart=elsewhere(options) is not None)
        self._examine(options, rundir)
        return [
            msgspec.structs.replace(host, address=network[host.name].address, interface=network[host.name].interface)
            for host in self.nodes()
        ]

    def _examine(self, options: Options, rundir: RunDir) -> None:
        """What `hpcrl doctor --nodes` looks at in passing, once: HpcrlError names the first thing that is wrong."""
        if self.examined:
            return
        self.examined = True
        own = bool(options.own_sandbox_hosts and self.groups[1:])
        roles = ["trainer", "engine", "rollout"][: len(self.groups) - own]
        roles += ["sandbox"] * (len(self.groups) - len(roles))
        steps = [
            NodeStep(role, len(g.nodes), g.slots, [*g.step, "doctor"])
            for role, g in zip(roles, self.groups, strict=True)
        ]
        job = NodesJob(
            steps,
            options.interface,
            gpus=False,
            echoes=ECHOES,
            seconds=launch_timeout(),
        )
        findings = examine(job, rundir.here / "doctor", launch_timeout())
        for finding in findings:
            if finding.level == "warn":
                say(finding.line())
        if bad := [finding for finding in findings if finding.level == "fail"]:
            raise HpcrlError(
                f"{bad[0].line()}{f' (and {len(bad) - 1} more)' if bad[1:] else ''}", "hpcrl doctor --nodes shows all"
            )

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[HostProcess]:
        refuse_shared_nodes(plan)
        self._watch_launcher(options, rundir)
        alone = set(plan.hosts) - set(plan.needed_hosts)
        members: list[HostProcess] = []
        for index, every in enumerate(self.groups):
            group = every.without(alone)
            if set(group.nodes) & set(plan.needed_hosts):
                log = rundir.logs / f"step-{index}.log"
                name = f"srun on {','.join(group.nodes)}"
                used = tuple(node for node in group.nodes if node in plan.hosts)
                process = spawn(self._step(group, "host", rundir), log)
                members.append(Step(name, log, process, nodes=used, all=group.nodes))
            for node in [node for node in every.nodes if node in alone]:  # whose loss ends no other's step
                log = rundir.logs / f"step-{node}.log"
                process = spawn(
                    self._step(dataclasses.replace(every, step=tuple(step_on(every.step, node))), "host", rundir), log
                )
                members.append(HostProcess(f"srun on {node}", log, process, expendable=node))
        return members

    def _replace(self, names: list[str], why: str, rundir: RunDir) -> list[str]:
        """Continue without these hosts as far as spare ones can take their places; those whose none can."""
        left = []
        for name in in_order(self.nodes(), names):
            hosts = self.nodes()
            spare = any(host.name == name and host.spare for host in hosts)
            if spare or replacement(hosts, name) is not None:
                leave_out(hosts, [name], f"{why} {name}", rundir)
                self.leave_out([name])
            else:
                left.append(name)
        return left

    def _known_broken(self, rundir: RunDir) -> list[str]:
        """The hosts that earlier jobs of the run have found broken, and that this one has all the same."""
        known = {host for root in (rundir.root, rundir.root.parent) for host in broken_hosts(root)}
        return [name for name in self.names if name in known]

    def _watch_launcher(self, options: Options, rundir: RunDir) -> None:
        """Have another node notice if this one is lost, where that does not end the job (`ORPHANED`)."""
        alive = self._guard is not None and self._guard.poll() is None and self._guard_node not in self.left_out
        if alive or not self._job_id or KEPT not in self.groups[0].step:
            return
        if self._guard is not None:
            self._guard.kill()
        here = os.environ.get("SLURMD_NODENAME", self.names[0])
        others = [(group, node) for group in self.groups for node in group.nodes if node != here]
        if not others:
            return
        group, node = next(((g, n) for g, n in others if n not in g.spares), others[0])  # one that is missed at once
        self._guarded, self._guard_node = (options, rundir), node
        root = next((r for r in (rundir.root, rundir.root.parent) if (r / STATE).is_file()), rundir.root)
        silence = int(max(options.hang_timeout, LEAST) + 2 * BEAT)
        program = ["bash", "-c", ORPHANED, "orphaned", self._job_id, str(root), str(silence), str(int(self._again))]
        words = [*without_container(step_on(group.step, node)), *program]
        self._guard = spawn([sys.executable, "-m", "hpcrl.run.process", *words], rundir.logs / "launcher-watch.log")

    def again(self, root: Path) -> str:
        return f"hpcrl resume {root}"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-m", "hpcrl.run.process", *self.groups[0].step, "once", *command], log)

    def silent(self, seconds: float) -> list[str]:
        """The hosts that cannot start a task within `seconds`: one srun a component asks them all, and those that left
        no file are asked once more alone, ABREAST of them at a time, so that a busy controller loses no healthy
        host."""
        end = Deadline(seconds)
        missing = self._unheard(Deadline(seconds / 2)) if self.answers else self.names
        found: list[str] = []
        for first in range(0, len(missing), ABREAST):
            part = missing[first : first + ABREAST]
            found += self._cannot_start(part, max(end.left, MORE))
        return found

    def _unheard(self, deadline: Deadline) -> list[str]:
        """The hosts from which no file has come before the deadline to one step over each component."""
        assert self.answers is not None
        folder = self.answers / f"answers-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError:
            return self.names
        command = [sys.executable, "-m", "hpcrl.run.process"]
        asked = [spawn([*command, *group.step, "answer", str(folder)], None) for group in self.groups]
        while missing := [node for node in self.names if node not in listed(folder)]:
            if deadline.over or all(process.poll() is not None for process in asked):
                break
            time.sleep(0.5)
        _kill(asked)
        return [node for node in missing if node not in listed(folder)]

    def _cannot_start(self, nodes: list[str], seconds: float) -> list[str]:
        """Those of `nodes` that do not start their own task within `seconds`."""
        steps = {node: group.step for group in self.groups for node in group.nodes}
        command = [sys.executable, "-m", "hpcrl.run.process"]
        plain = {node: without_container(step_on(steps[node], node)) for node in nodes}
        waiting = {node: spawn([*command, *plain[node], "true"], None) for node in nodes}
        deadline = Deadline(seconds)
        while any(p.poll() is None for p in waiting.values()) and not deadline.over:
            time.sleep(0.1)
        bad = [node for node, process in waiting.items() if process.poll() != 0]
        _kill(waiting.values())
        return bad

    def _step(self, group: HetGroup, program: str, rundir: RunDir) -> list[str]:
        words = [program, str(rundir.root), "--attempt", str(rundir.attempt)]
        return [sys.executable, "-m", "hpcrl.run.process", *group.step, *words]


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()


def _check_started(steps: list[subprocess.Popen[bytes]], log: Path) -> None:
    """HpcrlError with its last words if an srun could not start its tasks."""
    if any(step.poll() for step in steps):
        lines = [line.decode(errors="replace") for line in last_lines(log) if line.strip()]
        ours = [line.partition("hpcrl: error: ")[2] for line in lines if "hpcrl: error: " in line]
        of_tasks = [line for line in lines if not line.startswith("srun: ")][-1:]  # srun only says that they ended
        why = (ours or of_tasks or [line for line in lines if "error: " in line] or ["srun gave no reason"])[0]
        raise HpcrlError(f"the first tasks did not start: {why}", f"see {log}")


# ---- other users on these nodes
#
# Whether other users may run on the nodes of this job, in Slurm's own words.
#
# An engine over several hosts has vLLM's own store and message queues on the network, which admit any peer; on nodes
# of this user alone there is no other user's process to be one.
#
# Invariant: nodes count as this user's alone only where Slurm says so; an answer that cannot be had counts as no.

PATIENCE = 60.0  #: seconds that Slurm may take until it answers

#: of `scontrol show job`: nodes for this job, for this user
ALONE = re.compile(r"\b(OverSubscribe=(NO|USER)|Exclusive=(NODE|USER|TOPO))\b")
#: the same of `scontrol show partition`
ALONE_THERE = re.compile(r"\b(OverSubscribe=EXCLUSIVE|ExclusiveUser=YES)\b")


def refuse_shared_nodes(plan: Plan) -> None:
    """Raise UsageError if an engine of this plan lies on several nodes that other users may use, unless the site's
    profile allows that."""
    wide = [number for number, engine in enumerate(plan.engines) if engine.also]
    if not wide or os.environ.get("HPCRL_SHARED_NODES"):
        return
    job = os.environ.get("SLURM_JOB_ID", "")
    if (why := shared(job)) is not None:
        hosts = ", ".join(part.host for part in plan.engine_nodes(wide[0]))
        raise UsageError(
            f"engine {wide[0]} lies on {hosts}, which other users may share ({why}), and vLLM's connections between "
            "hosts do not prove who is there: another user of the network could run code in it",
            "ask for whole nodes (exclusive = true in the site's profile, or sbatch --exclusive), or set "
            "shared_nodes = true there",
        )


def shared(job: str) -> str | None:
    """Why the nodes of a job do not count as its user's alone; None if they do."""
    answer = _scontrol_show("job", job)
    if answer.code != 0:
        return f"scontrol show job {job}: {answer.last_output}"
    for line in filter(str.strip, answer.out.splitlines()):
        partition = re.search(r"\bPartition=(\S+)", line)
        if not ALONE.search(line) and not (partition and _alone_in(partition[1])):
            said = re.search(r"\bOverSubscribe=\S+", line)
            return f"Slurm says {said[0]}" if said else "Slurm does not say"
    return None


def _scontrol_show(what: str, name: str) -> CommandResult:
    """What `scontrol show` says; asked again for PATIENCE seconds, since a controller that starts hundreds of nodes is
    busy."""
    deadline = Deadline(PATIENCE)
    for pause in Pauses(1.0, 10.0):
        answer = squeue.call(["scontrol", "--oneliner", "show", what, name])
        if answer.code == 0 or deadline.left < pause:
            break
        time.sleep(pause)
    return answer


def _alone_in(partition: str) -> bool:
    answer = _scontrol_show("partition", partition)
    return answer.code == 0 and bool(ALONE_THERE.search(answer.out))
