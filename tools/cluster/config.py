"""What the daemons of the cluster read: slurm.conf and its companions, hosts, ssh.

Invariant: pure text from a Layout and a user's name, written once before the first process starts.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import uuid
from pathlib import Path

from tools.cluster.layout import GPUS_PER_NODE, GRACE, HEAD, Layout

DATABASE_PORT = 3306
DATABASE = "slurm_acct_db"
SLURMDBD_PORT = 6819
SLURMCTLD_PORT = 6817


def user() -> str:
    """Name of whoever runs the cluster: Slurm's user, and the only one who submits."""
    return pwd.getpwuid(os.getuid()).pw_name


def slurm(layout: Layout) -> str:
    """slurm.conf.  The intervals are far below Slurm's own, so that a test waits seconds and not minutes."""
    kind = "cgroup" if layout.cgroups else "linux"
    lines = [
        "ClusterName=hpcrl",
        f"SlurmctldHost={HEAD}({layout.address(HEAD)})",
        f"SlurmUser={user()}",
        f"SlurmdUser={user()}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # a requeued job may not start before its old credential has expired: 120 s unless told
        "AuthInfo=cred_expire=5",
        f"StateSaveLocation={layout.state}",
        f"SlurmdSpoolDir={layout.base}/spool/%n",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        f"ProctrackType=proctrack/{'cgroup' if layout.cgroups else 'linuxproc'}",
        f"TaskPlugin=task/{'cgroup' if layout.cgroups else 'none'}",
        f"JobAcctGatherType=jobacct_gather/{kind}",
        "JobAcctGatherFrequency=task=2",
        "SelectType=select/cons_tres",
        f"SelectTypeParameters={'CR_Core_Memory' if layout.bare else 'CR_CPU_Memory'}",
        f"TaskProlog={layout.etc}/task_prolog",
        # the nodes say that they have more than this machine
        "SlurmdParameters=config_overrides",
        "SlurmctldParameters=preempt_send_user_signal,enable_expedited_requeue",
        # a node that was cut off comes back by itself
        "ReturnToService=2",
        "MailProg=/bin/true",
        f"MpiDefault={_mpi(layout)}",
        *([] if layout.bare else ["GresTypes=gpu"]),
        "KillWait=5",
        "SlurmdTimeout=12",
        "SlurmctldTimeout=20",
        "MinJobAge=3600",
        "FirstJobId=1000",
        # heterogeneous jobs are started by the backfill pass alone
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,bf_hetjob_immediate,sched_interval=2,sched_min_interval=100000,batch_sched_delay=0",
        "PreemptMode=REQUEUE",
        *(_accounting(layout) if layout.accounting else ["PreemptType=preempt/partition_prio"]),
        "NodeName=DEFAULT CPUs=16 Sockets=1 RealMemory=64000 "
        + (
            "CoresPerSocket=8 ThreadsPerCore=2"
            if layout.bare
            else f"CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:{GPUS_PER_NODE}"
        ),
        *(f"NodeName={node} NodeAddr={layout.address(node)}" for node in layout.workers),
        *_partitions(layout),
    ]
    return "\n".join(lines) + "\n"


def _mpi(layout: Layout) -> str:
    """As most centres have it where the release has it: what knows of ranks is every step's default; the machine's own
    Slurm has none."""
    for plugin in ("pmix", "pmi2") if layout.release else ():
        if [*(layout.root / "usr/lib").glob(f"*/slurm*/mpi_{plugin}.so")]:
            return plugin
    return "none"


def _accounting(layout: Layout) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={HEAD}",
        *([] if layout.bare else ["AccountingStorageTRES=gres/gpu"]),
        "AccountingStorageEnforce=associations,qos",
        "PreemptType=preempt/qos",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=1000",
        "PriorityWeightPartition=1000",
    ]


def _partitions(layout: Layout) -> list[str]:
    if layout.bare:
        one = [f"PartitionName=one{i} Nodes=node{i}" for i in range(1, layout.nodes + 1)]
        return ["PartitionName=DEFAULT State=UP MaxTime=INFINITE", "PartitionName=cpu Nodes=ALL Default=NO", *one]
    half = max(layout.nodes // 2, 1)
    later = f"node[{min(half + 1, layout.nodes)}-{layout.nodes}]"
    return [
        "PartitionName=DEFAULT State=UP MaxTime=INFINITE PriorityTier=10",
        "PartitionName=main Nodes=ALL Default=YES",
        f"PartitionName=train Nodes=node[1-{half}]",
        f"PartitionName=rollout Nodes={later}",
        "PartitionName=small Nodes=ALL MaxTime=5 MaxNodes=1",
        f"PartitionName=low Nodes=ALL PriorityTier=1 GraceTime={GRACE}",
    ]


#: For sacctmgr, before slurmctld starts.  Preemption goes by QOS: high and normal push out low.  Whoever submits to the
#: partition `low` without a word gets the QOS low, so that partition preempts partition as well.
SACCTMGR = """\
add cluster hpcrl
add qos low PreemptMode=requeue Priority=0 GraceTime={grace}
add qos high Priority=100
modify qos normal,high set Preempt=low
modify qos normal set Priority=10
add account hpcrl Description=hpcrl Organization=hpcrl
add user {user} account=hpcrl qos=normal,low,high defaultqos=normal
add user {user} account=hpcrl partition=low qos=low defaultqos=low
modify user {user} set defaultaccount=hpcrl
"""


def slurmdbd(layout: Layout) -> str:
    """slurmdbd.conf: the database is on the head's loopback, without a password."""
    return f"""\
AuthType=auth/munge
DbdHost={HEAD}
DbdAddr={layout.address(HEAD)}
SlurmUser={user()}
LogFile={layout.log}/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser={user()}
StorageLoc={DATABASE}
"""


#: Slurm gives jobs GPUs that are no GPUs.
ON_CPUS = """\
#!/bin/bash
echo "export HPCRL_ON_CPUS=1"
"""
#: Of a bare cluster: every job has a temporary directory of its own on each node, which no other node has under that
#: name.
TASK_PROLOG = """\
#!/bin/bash
mkdir -p "/tmp/job-$SLURM_JOB_ID-$SLURMD_NODENAME"
echo "export TMPDIR=/tmp/job-$SLURM_JOB_ID-$SLURMD_NODENAME"
"""


CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""


def hosts(layout: Layout) -> str:
    """/etc/hosts of every node."""
    return "\n".join(["127.0.0.1 localhost", *(f"{layout.address(host)} {host}" for host in layout.hosts), ""])


def sshd(layout: Layout) -> str:
    """sshd_config: one key opens every node, to the user who runs the cluster."""
    return f"""\
HostKey {layout.ssh}/host
AuthorizedKeysFile {layout.ssh}/id.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 100
"""


def ssh(layout: Layout) -> str:
    """ssh_config: seen as /etc/ssh/ssh_config inside, so that a plain `ssh node1` works there."""
    return f"""\
Host node* head {layout.address(HEAD).rpartition(".")[0]}.*
  IdentityFile {layout.ssh}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  User {user()}
"""


#: what a shell reads of the user's home when it starts; each is read in one's stead that comes later here
START_FILES = (".bash_profile", ".bash_login", ".profile", ".bashrc")
#: Open MPI's, of the whole cluster: release 6 finds no way between two hosts of which each has a loopback as well
OPENMPI = "btl_tcp_if_include = eth0\n"
START_FILE = "# The start-up file of every shell on the test cluster, of a login and of ssh alike.\n"


def write(layout: Layout) -> None:
    """Write all of it below layout.base, with a new munge key and new ssh keys."""
    for directory in (layout.etc, layout.log, layout.state, layout.ssh, layout.base / "dev"):
        directory.mkdir(parents=True, exist_ok=True)
    for node in layout.workers:
        (layout.base / "spool" / node).mkdir(parents=True, exist_ok=True)
    devices = f"Name=gpu File={layout.base}/dev/nvidia[0-{GPUS_PER_NODE - 1}]\n"
    texts = {"slurm.conf": slurm(layout), "gres.conf": devices, "hosts": hosts(layout), "sshd_config": sshd(layout)}
    texts |= {"ssh_config": ssh(layout), "shell_start": START_FILE, "openmpi-mca-params.conf": OPENMPI} | {
        f"hostname.{host}": f"{host}\n" for host in layout.hosts
    }
    texts |= {f"boot_id.{host}": f"{uuid.uuid4()}\n" for host in layout.hosts}
    if layout.accounting:
        texts["slurmdbd.conf"] = slurmdbd(layout)
        texts["database.sql"] = f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
    if layout.cgroups:
        texts["cgroup.conf"] = CGROUP
    texts["task_prolog"] = TASK_PROLOG if layout.bare else ON_CPUS
    modes = {"slurmdbd.conf": 0o600, "task_prolog": 0o755}
    for name, text in texts.items():
        _private(layout.etc / name, text.encode(), modes.get(name, 0o644))
    _private(layout.base / "munge.key", secrets.token_bytes(128), 0o400)
    for name in ("host", "id"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"hpcrl-{name}", "-f", str(layout.ssh / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)
    _libraries(layout)


def _private(path: Path, data: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def _libraries(layout: Layout) -> None:
    """Libraries under the names that they are asked for by; Debian has those only in its development packages.

    Slurm's PMIx plugin opens libpmix.so in one directory: every node sees a copy with that name there.  mpi4py's wheel
    opens libmpi.so.12, the name by the MPI ABI, which MPICH calls libmpich.so.12; Open MPI is here as well, so that
    name may not be found unasked: it is in a directory for LD_LIBRARY_PATH.
    """
    for pmix in (layout.root / "usr/lib").glob("*/pmix2/lib"):
        shutil.copytree(pmix, layout.pmix, symlinks=True)
        if not (layout.pmix / "libpmix.so").exists():
            (layout.pmix / "libpmix.so").symlink_to("libpmix.so.2")
    layout.mpich.mkdir()
    for library in (layout.root / "usr/lib").glob("*/libmpich.so.12"):
        (layout.mpich / "libmpi.so.12").symlink_to(Path("/", library.relative_to(layout.root)))
