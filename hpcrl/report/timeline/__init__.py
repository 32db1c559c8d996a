"""What every process of a run did when: written by the processes themselves; read as a trace, a picture, node-hours."""
