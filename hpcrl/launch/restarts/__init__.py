"""Whether a run goes on after an attempt, in which job, and without which hosts."""
