"""A check of every node of an allocation, before a run starts there."""
