"""One of each small mechanism that every process needs; this room knows nothing of training, launchers or engines.

deadline.py    how long something may take, and waiting for it
arguments.py   the parser of commands that take no options of a run
retry.py       trying again what may pass
liveness.py       when a peer was last heard of
plugins.py     what a folder of files registers: one file, one name
"""
