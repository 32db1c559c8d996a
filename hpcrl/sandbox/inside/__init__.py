"""What runs inside of a box as its first process: a box sees this folder, Python's own, and utils/waiting.py.

    `main.py`       process 1: gives up every right, then is `first.py`, which answers what the box's user asks
    `commands.py`   the commands that it starts, `files.py` files in and out, `frames.py` the stream to the user
    `kernel.py`     system calls that Python has not, `seccomp.py` those that are refused from then on

Invariant: the standard library alone is imported from elsewhere.
"""
