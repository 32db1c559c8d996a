"""What engines read of files: nothing of a model at the start of a run that trains; the directories of updates."""
