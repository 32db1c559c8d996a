"""The checks of numbers, transports and memory on the user's own hardware.

Open `registry.py` first: it finds the checks, one file each in `checks/`, and keeps their results.  `this_host.py`
makes them on this host, `job.py` over the nodes of a job.
"""
