"""`hpcrl try`: prompts, responses and rewards of a recipe, of which nothing is trained."""
