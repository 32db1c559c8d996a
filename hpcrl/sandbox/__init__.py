"""A place for programs that are not trusted: what they see, may call and may use is decided before they begin.

`run_confined` (`run.py`) runs a command there and hands back what it wrote; `confine` (`confine.py`) puts the calling
process itself there, for good.  Both take a `View` of files, and both refuse where the kernel lets this user make no
namespaces: nothing is run half confined.

| of the machine | a confined program has | by |
|---|---|---|
| files | system directories and those of its View, read-only; one bounded /tmp | a private root (`private_root.py`) |
| home, /run, /sys, devices, sockets in files | none | the same: they are not in that root |
| networks, abstract sockets, System V IPC | none | namespaces of its own |
| other processes | none that it sees or can signal | a PID namespace, or `seccomp.py` where it has none |
| terminals | none | a session of its own, no /dev/tty, no ioctl that types |
| privileges | none, nor any that a program file could give | no capabilities, no new privileges |
| kernel interfaces for administrators and debuggers | none | `seccomp.py` |
| time, memory, processes, files, output | bounded | limits, and `main.py`, which watches |

Invariant: standard library alone, and nothing imported from the rest of hpcrl but errors and deadlines, so that it
starts quickly and can be read as a whole.
"""
