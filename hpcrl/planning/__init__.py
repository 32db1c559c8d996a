"""What a run will need, before it is submitted: memory, operations, and a rehearsal of its ranks."""
