"""A real Slurm and MPI cluster on one machine: every node is a set of namespaces.

    python -m tools.cluster start DIR        a head, node1 .. node4, Slurm with accounting, one sshd a node
    python -m tools.cluster shell DIR        a login shell on the head: sinfo, sbatch, mpirun, ssh node2
    python -m tools.cluster kill-node DIR node3
    python -m tools.cluster stop DIR

DIR plays the shared file system.  Who does what:

    control.py    from outside: start, stop, run a command on a node, cut its power or its cable
    sandbox.py    process 1 of the outer namespace: the switch, the nodes; when it ends, all of it ends
    node.py       process 1 of a node: private /tmp, /run, /dev/shm, its daemons, and it reaps orphans
    layout.py     paths, names, addresses; config.py  what the daemons read; processes.py  what runs where
    packages.py   the Debian packages that it needs (packages.txt)
"""
