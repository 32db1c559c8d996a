"""The engines of a host: kept while they are wanted, and added to a run that is under way."""
