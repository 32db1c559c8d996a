"""`hpcrl try`: a recipe tried out, with an engine that stays up for a while."""
