"""How a rollout is made: which groups are issued, what happens to those in flight, and which are the batch.

Open `batch_generator.py` first, the algorithm on one page; `continuous_generator.py` is that of --loop fully-async.
Both ask `batch_policies.py` (pure) how many groups to issue, and `group_store.py` for the groups.
"""
