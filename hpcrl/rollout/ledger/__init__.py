"""What became of every group: the ledger, what is kept of groups on disk, the account of a whole run."""
