"""The rehearsal of a run before the queue: every distinct rank takes a step on a device that knows shapes alone."""
