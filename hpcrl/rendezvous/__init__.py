"""Where the members of a process group meet: a store of torch.distributed that admits only holders of the run's keys.

Open `store.py` first; `table.py` has the rules as a pure object.
"""
