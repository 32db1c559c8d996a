"""What the documents print is run: every command line of README, docs/, recipes' heads and `--help`, taken from the
texts."""
