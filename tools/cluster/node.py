"""Process 1 of a node: `python -m tools.cluster.node DIR NAME`, in its own net, uts, ipc, mount and pid namespaces.

Invariant: everything that runs on the node is below this process, so SIGKILL to it is a power cut; it outlives its
daemons (slurmd alone may be killed) and reaps orphans at once, so that a dead process never looks alive.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import time
from pathlib import Path

from tools.cluster import config
from tools.cluster.layout import GRACE, HEAD, PRIVATE, Layout, read
from tools.cluster.mounts import bind, fresh_sys, mount, private

#: seconds that one piece of the start may take on a busy machine
PATIENCE = 90.0
CONTROLLERS = ("freezer", "memory", "devices", "cpuset", "cpuacct")
WHOLE_PROC = Path("/run/proc")  #: where no file of it is another


def main(shared: str, name: str) -> None:
    """Become the node."""
    layout = read(shared)
    socket.sethostname(name)
    if layout.cgroups and name != HEAD:
        _own_cgroups(layout, name)
    _mounts(layout, name)
    _network(layout, name)
    _common_daemons(layout, name)
    if name == HEAD:
        _head(layout)
    else:
        wait_for_port(layout.address(HEAD), config.SLURMCTLD_PORT)
        subprocess.Popen(["slurmd", "-D"])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.5)


def _own_cgroups(layout: Layout, name: str) -> None:
    """A cgroup of its own in every hierarchy, which is all that the node sees."""
    for controller in CONTROLLERS:
        group = layout.cgroup(controller, name)
        group.mkdir(exist_ok=True)
        if controller == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((group.parent / file).read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))


def _mounts(layout: Layout, name: str) -> None:
    visible = [layout.shared, *map(Path, layout.visible)]
    fresh_sys()
    if layout.cgroups and name != HEAD:
        for controller in CONTROLLERS:
            bind(layout.cgroup(controller, name), f"/sys/fs/cgroup/{controller}")
    for directory in PRIVATE:
        private(directory, "755" if directory == "/run" else "1777", visible)
    # of its own boot id /proc shows a file, and the kernel lets users mount a /proc where they see a whole one alone
    WHOLE_PROC.mkdir()
    mount("proc", WHOLE_PROC, "proc")
    # MPICH takes processes with one boot id for processes of one host
    own = {
        "hosts": "/etc/hosts",
        f"hostname.{name}": "/etc/hostname",
        f"boot_id.{name}": "/proc/sys/kernel/random/boot_id",
    }
    if layout.release:
        bind(layout.etc / "openmpi-mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf")
    for source, target in (own | {"ssh_config": "/etc/ssh/ssh_config"}).items():
        bind(layout.etc / source, target)
    # the user's own may take long, and nodes whose power is cut would leave in his home what it had begun to write
    # there
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for file in (home / name for name in config.START_FILES):
        if file.is_file():
            bind(layout.etc / "shell_start", file.resolve())
    bind(layout.etc, "/etc/slurm")
    for directory in Path("/usr/lib").glob("*/pmix2/lib"):
        bind(layout.pmix, directory)


def _network(layout: Layout, name: str) -> None:
    """The cable is plugged in from outside (sandbox.py); then the node's address is set."""
    deadline = time.monotonic() + PATIENCE
    while "eth0" not in (interface for _, interface in socket.if_nameindex()):
        if time.monotonic() > deadline:
            sys.exit(f"{name}: no cable was plugged in within {PATIENCE:.0f} s")
        time.sleep(0.005)
    commands = f"link set lo up\naddress add {layout.address(name)}/24 dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)


def _common_daemons(layout: Layout, name: str) -> None:
    for directory in ("munge", "sshd"):
        Path("/run", directory).mkdir(mode=0o755)
    # --force: in a user namespace the owner of / is not mapped, which munged would refuse
    munged = ["munged", "--force", f"--key-file={layout.base}/munge.key", "--seed-file=/run/munge/seed"]
    subprocess.run([*munged, f"--log-file={layout.log}/munged.{name}.log"], check=True)
    # sshd insists on being started by its full path
    subprocess.run(
        ["/usr/sbin/sshd", "-f", str(layout.etc / "sshd_config"), "-E", f"{layout.log}/sshd.{name}.log"], check=True
    )


def _head(layout: Layout) -> None:
    if layout.accounting:
        _database(layout)
        subprocess.Popen(["slurmdbd", "-D"])
        wait_for_port(layout.address(HEAD), config.SLURMDBD_PORT)
        commands = config.SACCTMGR.format(user=config.user(), grace=GRACE)
        subprocess.run(["sacctmgr", "-i"], input=commands, text=True, check=True)
    subprocess.Popen(["slurmctld", "-D"])
    wait_for_port(layout.address(HEAD), config.SLURMCTLD_PORT)
    deadline = time.monotonic() + PATIENCE
    while _idle() < layout.nodes:
        if time.monotonic() > deadline:
            sys.exit(f"head: not all nodes were idle within {PATIENCE:.0f} s:\n" + _sinfo("%N %T %E"))
        time.sleep(0.05)
    (layout.base / "ready").touch()


def _sinfo(form: str) -> str:
    try:
        return subprocess.run(["sinfo", "-h", "-N", "-o", form], capture_output=True, text=True, timeout=10).stdout
    except subprocess.TimeoutExpired:
        return ""


def _idle() -> int:
    """How many nodes are idle."""
    return len({line for line in _sinfo("%N %T").splitlines() if line.endswith(" idle")})


def _database(layout: Layout) -> None:
    """MariaDB on the head's loopback; durable enough for a cluster that lives for minutes."""
    data = layout.base / "db"
    name = pwd.getpwuid(os.getuid()).pw_name
    tuning = ["--innodb-log-file-size=4M", "--innodb-flush-method=nosync", f"--datadir={data}", f"--user={name}"]
    if not data.is_dir():
        install = ["mariadb-install-db", "--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run([*install, *tuning], check=True, stdout=subprocess.DEVNULL)
    server = ["mariadbd", "--no-defaults", *tuning, "--bind-address=127.0.0.1", f"--port={config.DATABASE_PORT}"]
    server += ["--socket=/run/mysqld.sock", "--pid-file=/run/mysqld.pid", "--skip-grant-tables", "--skip-name-resolve"]
    server += ["--skip-log-bin", "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"]
    server += [
        "--loose-innodb-snapshot-isolation=OFF",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
        "--max-connections=20",
    ]
    # one release's slurmdbd comes to no good with one release's library if it has to create its database itself
    server += [f"--init-file={layout.etc}/database.sql"]
    with open(layout.log / "mariadb.log", "ab") as log:
        subprocess.Popen(server, stdout=log, stderr=log)
    wait_for_port("127.0.0.1", config.DATABASE_PORT)


def wait_for_port(address: str, port: int) -> None:
    """Until somebody listens there.  Ends the node with a clear line if nobody does."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{socket.gethostname()}: nobody listens on {address}:{port} after {PATIENCE:.0f} s: {error}")
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
