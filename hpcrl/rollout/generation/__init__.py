"""How a rollout is made: which groups are issued, what happens to those in flight, and which are the batch.

Open `generator.py` first, the algorithm on one page.  Its policy in `batch_policies.py` (pure) says how many groups to
issue and when a batch is there: until it is full, or with --loop fully-async as far ahead as staleness allows.
`group_store.py` has the groups.
"""
