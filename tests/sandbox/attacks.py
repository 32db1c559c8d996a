"""What a hostile program tries: `python3 attacks.py VICTIM.json`, the standard library alone.

It prints a JSON object: the name of each attempt, and whether it got what it wanted.  VICTIM.json says what there is of
the same user outside (`victim.py`).  `try_NAME` is an attempt; it is done in a process of its own.
"""

import ctypes
import glob
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
MARK = "hpcrl-attack-was-here"


def text_of(path: str) -> str:
    """The text of a file."""
    with open(path, errors="replace") as file:
        return file.read()


def call(x86: int, arm: int, *words: object) -> int:
    """A system call; its result, or minus the error."""
    result = LIBC.syscall(ctypes.c_long(x86 if X86 else arm), *words)
    return result if result >= 0 else -ctypes.get_errno()


def allowed(result: int) -> bool:
    """Whether the kernel has looked at a call's arguments, rather than refuse it."""
    return -result not in (1, 38)  # EPERM, ENOSYS


def connects(family: int, address: object, kind: int = socket.SOCK_STREAM) -> bool:
    with socket.socket(family, kind) as found:
        found.settimeout(2)
        found.connect(address)
        found.sendall(MARK.encode())
    return True


# ---- files


def try_read_a_secret_of_home(v: dict) -> bool:
    return "secret" in text_of(v["secret"])


def try_see_home(v: dict) -> bool:
    return bool(os.listdir(v["home"]))


def try_read_through_proc_root(v: dict) -> bool:
    return any("secret" in text_of(f"{root}{v['secret']}") for root in ("/proc/1/root", f"/proc/{v['pid']}/root"))


def try_overwrite(v: dict) -> bool:
    return open(v["file"], "w").write(MARK) > 0


def try_truncate(v: dict) -> bool:
    return os.truncate(v["file"], 0) is None


def try_remove(v: dict) -> bool:
    return os.remove(v["file"]) is None


def try_rename(v: dict) -> bool:
    return os.rename(v["file"], v["file"] + "x") is None


def try_chmod(v: dict) -> bool:
    return os.chmod(v["file"], 0o777) is None


def try_utime(v: dict) -> bool:
    return os.utime(v["file"], (1, 1)) is None


def try_setxattr(v: dict) -> bool:
    return os.setxattr(v["file"], "user.x", b"y") is None


def try_chmod_what_is_shown(v: dict) -> bool:
    return os.chmod(os.path.abspath(__file__), 0o777) is None


def try_utime_of_what_is_shown(v: dict) -> bool:
    return os.utime(os.path.abspath(__file__), (1, 1)) is None


def try_setxattr_on_what_is_shown(v: dict) -> bool:
    return os.setxattr(os.path.abspath(__file__), "user.x", b"y") is None


def try_write_next_to_the_script(v: dict) -> bool:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), MARK)
    return open(path, "w").write("x") > 0


def try_link_to_a_file(v: dict) -> bool:
    return os.link(v["file"], v["file"] + "y") is None


def try_leave_a_file_in_tmp(v: dict) -> bool:
    """Below /tmp as it is outside."""
    return open(os.path.join(v["shared"], MARK), "w").write("x") > 0


def try_see_tmp(v: dict) -> bool:
    return os.path.exists(v["shared"])


def try_write_to_system_directories(v: dict) -> bool:
    for folder in ("/usr", "/usr/local", "/etc", "/"):
        try:
            path = os.path.join(folder, MARK)
            open(path, "w").close()
            os.remove(path)
            return True
        except OSError:
            continue
    return False


def try_change_a_setting_of_the_kernel(v: dict) -> bool:
    for name in ("sys/kernel/core_pattern", "sys/kernel/sysrq", "sysrq-trigger", "sys/vm/drop_caches"):
        try:
            os.close(os.open(f"/proc/{name}", os.O_WRONLY))
            return True
        except OSError:
            continue
    return False


def try_read_shadow(v: dict) -> bool:
    return bool(text_of("/etc/shadow"))


def try_open_by_handle(v: dict) -> bool:
    return allowed(call(304, 265, 0, b"\0" * 32, 0))


def try_see_sys(v: dict) -> bool:
    return bool(os.listdir("/sys"))


def try_chmod_of_standard_input(v: dict) -> bool:
    """The machine's /dev/null, to which every process of root writes."""
    return os.fchmod(0, os.fstat(0).st_mode & 0o7777) is None


# ---- sockets


def try_socket_in_home(v: dict) -> bool:
    return connects(socket.AF_UNIX, v["socket"])


def try_abstract_socket(v: dict) -> bool:
    return connects(socket.AF_UNIX, "\0" + v["abstract"])


def try_tcp_of_the_loopback(v: dict) -> bool:
    return connects(socket.AF_INET, ("127.0.0.1", v["tcp"]))


def try_udp(v: dict) -> bool:
    return connects(socket.AF_INET, ("127.0.0.1", v["udp"]), socket.SOCK_DGRAM)


def try_let_connections_in(v: dict) -> bool:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
    return True


def try_make_a_unix_socket(v: dict) -> bool:
    return socket.socket(socket.AF_UNIX) is not None


def try_netlink(v: dict) -> bool:
    return socket.socket(16, socket.SOCK_RAW) is not None


def try_well_known_sockets(v: dict) -> bool:
    """docker, D-Bus, systemd, ssh-agent, tmux, X: whatever there is of them."""
    places = ("/run/*", "/var/run/*", "/run/user/*/*", "/tmp/tmux-*/*", "/tmp/ssh-*/*", "/tmp/.X11-unix/*")
    return any(glob.glob(place) for place in places)


def try_tmux(v: dict) -> bool:
    words = ["/usr/bin/tmux", "-S", v["tmux"] or "/nowhere", "send-keys", f"touch {v['typed']}", "Enter"]
    done = subprocess.run(words, capture_output=True, timeout=20, check=False)
    return done.returncode == 0


# ---- processes


def try_kill(v: dict) -> bool:
    os.kill(v["pid"], signal.SIGKILL)
    time.sleep(0.2)
    return not os.path.exists(f"/proc/{v['pid']}") and os.path.exists("/proc/self")


def try_kill_all(v: dict) -> bool:
    """kill -9 -1 as a whole user would be ended by; asked of a process that it would end too, so none answers."""
    child = os.fork()
    if child == 0:
        for pid in (v["pid"], -v["pid"]):
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                continue
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def try_pidfd(v: dict) -> bool:
    return os.pidfd_open(v["pid"]) >= 0


def try_environ_of_another(v: dict) -> bool:
    return "SECRET" in text_of(f"/proc/{v['pid']}/environ")


def try_command_lines_of_others(v: dict) -> bool:
    return any(MARK in text_of(path, errors="replace") for path in glob.glob("/proc/[0-9]*/cmdline"))


def try_memory_of_another(v: dict) -> bool:
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    return allowed(call(310, 270, v["pid"], vector, 1, vector, 1, 0))


def try_ptrace(v: dict) -> bool:
    return LIBC.ptrace(0x4206, v["pid"], 0, 0) == 0


def try_ptrace_at_all(v: dict) -> bool:
    return LIBC.ptrace(0, 0, 0, 0) == 0


def try_priority_of_another(v: dict) -> bool:
    return os.setpriority(os.PRIO_PROCESS, v["pid"], 19) is None


def try_limits_of_another(v: dict) -> bool:
    import resource

    return bool(resource.prlimit(v["pid"], resource.RLIMIT_NOFILE, (10, 10)))


def try_affinity_of_another(v: dict) -> bool:
    return os.sched_setaffinity(v["pid"], {0}) is None


def try_signals_through_a_file(v: dict) -> bool:
    """F_SETOWN: a file that signals a process of one's choice."""
    import fcntl

    ours, theirs = os.pipe()
    fcntl.fcntl(ours, 10, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETOWN, v["pid"])
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(theirs, b"x")
    return True


def try_shared_memory_of_system_v(v: dict) -> bool:
    return LIBC.shmget(v["shm"], 0, 0) >= 0


def try_files_that_were_left_open(v: dict) -> bool:
    return any(os.readlink(f"/proc/self/fd/{name}").startswith(v["home"]) for name in os.listdir("/proc/self/fd"))


# ---- terminals


def try_terminal(v: dict) -> bool:
    for path in ("/dev/tty", v["terminal"], "/dev/console"):
        try:
            number = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        except OSError:
            continue
        os.write(number, MARK.encode())
        return True
    return False


def try_type_into_a_terminal(v: dict) -> bool:
    """TIOCSTI: refused by the filter with EPERM, else there is the answer that this is no terminal."""
    number = os.open("/dev/null", os.O_RDWR)
    LIBC.ioctl(number, 0x5412, b"x")
    return ctypes.get_errno() != 1


def try_type_by_the_upper_half(v: dict) -> bool:
    """The kernel reads 32 bits of a request; a filter must not be fooled by more."""
    number = os.open("/dev/null", os.O_RDWR)
    LIBC.syscall(ctypes.c_long(16 if X86 else 29), number, ctypes.c_ulong(0x100005412), b"x")
    return ctypes.get_errno() != 1


def try_linux_console(v: dict) -> bool:
    LIBC.ioctl(os.open("/dev/null", os.O_RDWR), 0x541C, b"\x03")
    return ctypes.get_errno() != 1


# ---- the kernel


def try_user_namespace(v: dict) -> bool:
    return LIBC.unshare(0x10000000) == 0


def try_user_namespace_by_clone(v: dict) -> bool:
    return allowed(call(56, 220, 0x10000000 | 17, 0, 0, 0, 0))


def try_clone3(v: dict) -> bool:
    return allowed(call(435, 435, struct.pack("Q", 0x10000000) + b"\0" * 56, 64))


def try_mount(v: dict) -> bool:
    return LIBC.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0


def try_new_mount_calls(v: dict) -> bool:
    return any(allowed(call(number, number, 0, 0, 0)) for number in (428, 429, 430, 432, 442))


def try_make_writable(v: dict) -> bool:
    return LIBC.mount(None, b"/", None, 0x1020, None) == 0


def try_unmount(v: dict) -> bool:
    return LIBC.umount2(b"/tmp", 2) == 0


def try_chroot(v: dict) -> bool:
    return os.chroot("/tmp") is None


def try_device(v: dict) -> bool:
    return os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0)) is None


def try_keyring(v: dict) -> bool:
    return allowed(call(248, 217, b"user", b"x", b"y", 1, -3)) or allowed(call(250, 219, 0, -3, 0))


def try_bpf(v: dict) -> bool:
    return allowed(call(321, 280, 0, 0, 0))


def try_perf(v: dict) -> bool:
    return allowed(call(298, 241, 0, 0, -1, -1, 0))


def try_userfaultfd(v: dict) -> bool:
    return allowed(call(323, 282, 1))


def try_io_uring(v: dict) -> bool:
    return allowed(call(425, 425, 1, 0))


def try_other_numbering(v: dict) -> bool:
    """x32: the same calls under other numbers."""
    return X86 and call(0x40000000 + 39, 0) > 0


def try_setuid_program(v: dict) -> bool:
    """no_new_privs is set."""
    return "NoNewPrivs:\t1" not in text_of("/proc/self/status")


def try_capabilities(v: dict) -> bool:
    lines = text_of("/proc/self/status").splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("CapEff", "CapPrm", "CapBnd", "CapAmb")))


def try_host_name(v: dict) -> bool:
    return LIBC.sethostname(b"mine", 4) == 0


def try_new_calls(v: dict) -> bool:
    """Those that this list of calls does not know: open_tree_attr is a way to mount."""
    return any(allowed(call(number, number, 0, 0, 0)) for number in (463, 466, 467, 468, 469))


# ---- what stays


def try_not_to_end_with_its_parent(v: dict) -> bool:
    return LIBC.prctl(1, 0, 0, 0, 0) == 0


def try_outlive_it(v: dict) -> bool:
    """A daemon; whether it lives is looked at from outside, by its command line."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            quiet = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(quiet, number)
            os.execv("/bin/sleep", ["sleep", v["sleep"]])
        os._exit(0)
    return False


def attempt(function: object, victim: dict) -> bool:
    """What one attempt got, in a process of its own, within some seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(25)
        try:
            got = bool(function(victim))
        except BaseException:  # noqa: BLE001  (whatever it meets)
            got = False
        os._exit(42 if got else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def main() -> None:
    with open(sys.argv[1]) as file:
        victim = json.load(file)
    wanted = sys.argv[2].split(",") if len(sys.argv) > 2 else []
    tries = {name[4:]: function for name, function in globals().items() if name.startswith("try_")}
    print(json.dumps({name: attempt(tries[name], victim) for name in tries if not wanted or name in wanted}))


if __name__ == "__main__":
    main()
