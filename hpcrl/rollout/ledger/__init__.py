"""Where every group is, and what is kept of groups on disk.

Open `ledger.py` first: its law says in which places a group can be.
"""
