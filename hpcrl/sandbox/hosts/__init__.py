"""Hosts that a sandbox may reach by HTTP and HTTPS, where it is asked for with any; no network is in it even then.

    the box's network namespace: lo alone        outside, a process of this box alone
    command --> 127.0.0.1:3128, a socket      =======>  `proxy.py` takes what comes through the socket,
                that listens (`listener.py`)                asks `utils/host_rules.py`, and connects

A socket stays in the namespace that it was made in, in the hands of any process: the box's first process makes one that
listens and hands it out, and a process outside takes connections from it.  Nothing of ours runs inside, and no route
leads out.

Invariant: a box that was asked for without hosts has none of this, and its commands can make no socket at all.
"""
