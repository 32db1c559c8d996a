"""Who makes the namespaces of a box: this package ("namespaces"), or a program that a site has for that.

    `bubblewrap.py`, `crun.py`, `apptainer.py`   the kinds: how the program is called, one file each
    `container_kind.py`               what such a file has, and is told
    `choose.py`                       which there are, and what one needs on this node, made ready once
    `runtime.py`, `inside.py`         the Python that a box's first process is run by, whatever the image has; where it
                                      is inside, with the machine's own directories
    `container.py`                    outside, of the keeper: the program is started, and ended
    `first_process.py`                inside: what the program has made is looked at, given up, and served

Everything else is the same: the protocol, the limits, the filter of system calls, the keeper outside that watches.

Invariant: a box of another kind is served once its first process is process 1 of a PID namespace, has no capability,
and sees nothing that it could write to but memory that its keeper counts; otherwise it is refused.
"""
