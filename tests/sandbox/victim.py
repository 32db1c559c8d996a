"""What a user has on a machine: `python3 victim.py DIRECTORY`, the standard library alone.

It makes files, sockets, a process with a secret, a terminal and, where there is one, a tmux server; says as JSON where
they are; and after a line on standard input says as JSON what was done to them.  It ends when its input does.
"""

import ctypes
import json
import os
import pty
import select
import shutil
import socket
import stat
import subprocess
import sys
import time

MARK = "hpcrl-attack-was-here"


def text_of(path: str) -> str:
    """The text of a file."""
    with open(path, errors="replace") as file:
        return file.read()


def listening(family: int, kind: int, address: object) -> socket.socket:
    found = socket.socket(family, kind)
    found.bind(address)
    if kind == socket.SOCK_STREAM:
        found.listen(8)
    return found


def start_tmux(path: str) -> str:
    """A tmux server's socket, "" where there is no tmux."""
    if not shutil.which("tmux"):
        return ""
    words = ["tmux", "-f", "/dev/null", "-S", path, "new-session", "-d", "-x", "80", "-y", "24", "/bin/sh"]
    done = subprocess.run(
        words, env={"PATH": "/usr/bin:/bin", "HOME": "/", "SHELL": "/bin/sh", "TERM": "screen"}, check=False, timeout=20
    )
    return "" if done.returncode else path


def main() -> None:
    folder = sys.argv[1]
    home = os.path.join(folder, "home")
    shared = os.path.join(folder, "shared")
    for place in (home, shared):
        os.mkdir(place)
    secret, file = os.path.join(home, "secret"), os.path.join(home, "file")
    for path in (secret, file):
        with open(path, "w") as made:
            made.write("a secret")
        os.chmod(path, 0o600)
        os.utime(path, (1e9, 1e9))
    abstract = f"hpcrl-{os.getpid()}"
    sockets = {
        "socket": listening(socket.AF_UNIX, socket.SOCK_STREAM, os.path.join(home, "agent")),
        "abstract": listening(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract),
        "tcp": listening(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        "udp": listening(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
    }
    master, slave = pty.openpty()
    sleeper = subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", "import time; time.sleep(600)", MARK], env={"SECRET": "x"}
    )
    shm_key = os.getpid()
    shm = ctypes.CDLL(None).shmget(shm_key, 4096, 0o1600)
    tmux = start_tmux(os.path.join(shared, "tmux"))
    typed = os.path.join(home, "typed")
    told = {
        "abstract": abstract,
        "file": file,
        "home": home,
        "pid": sleeper.pid,
        "secret": secret,
        "shared": shared,
        "shm": shm_key,
        "sleep": str(100000 + os.getpid()),
        "socket": os.path.join(home, "agent"),
        "tcp": sockets["tcp"].getsockname()[1],
        "terminal": os.ttyname(slave),
        "tmux": tmux,
        "typed": typed,
        "udp": sockets["udp"].getsockname()[1],
    }
    print(json.dumps(told), flush=True)
    try:
        sys.stdin.readline()
        time.sleep(1.0)  # what was typed into a shell takes a moment
        print(json.dumps(damage(told, sockets, sleeper, master)), flush=True)
    finally:
        sleeper.kill()
        ctypes.CDLL(None).shmctl(shm, 0, None)
        if tmux:
            subprocess.run(["tmux", "-S", tmux, "kill-server"], check=False, timeout=20)


def reached(place: socket.socket) -> bool:
    """Whether an attempt's own words have come; other tests may connect to all that listens."""
    place.settimeout(0.2)
    try:
        while True:
            if place.type == socket.SOCK_DGRAM:
                said = place.recv(64)
            else:
                caller, _ = place.accept()
                with caller:
                    caller.settimeout(0.2)
                    said = caller.recv(64)
            if MARK.encode() in said:
                return True
    except OSError:
        return False


def damage(told: dict, sockets: dict, sleeper: subprocess.Popen, master: int) -> list[str]:
    """What is not as it was."""
    found = []
    try:
        seen = os.stat(told["file"])
        if (stat.S_IMODE(seen.st_mode), seen.st_nlink, seen.st_mtime) != (0o600, 1, 1e9):
            found.append("file's mode, links or time")
        if os.listxattr(told["file"]):
            found.append("file's attributes")
        if text_of(told["file"]) != "a secret":
            found.append("file's text")
    except OSError:
        found.append("file")
    if set(os.listdir(told["home"])) - {"secret", "file", "agent"}:
        found.append("files in home")
    if set(os.listdir(told["shared"])) - {"tmux"}:
        found.append("files in tmp")
    for name, place in sockets.items():
        if reached(place):
            found.append(f"socket {name}")
    if sleeper.poll() is not None:
        found.append("process ended")
    elif (
        os.getpriority(os.PRIO_PROCESS, sleeper.pid) != os.getpriority(os.PRIO_PROCESS, 0)
        or "T" in text_of(f"/proc/{sleeper.pid}/stat").split()[2]
    ):
        found.append("process changed")
    if select.select([master], [], [], 0)[0]:
        found.append("terminal")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if text_of(f"/proc/{pid}/cmdline") == f"sleep\0{told['sleep']}\0":
                found.append("process left")
                os.kill(int(pid), 9)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
