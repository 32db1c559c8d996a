"""What an engine drafts with: layers of its own that updates bring, and how vLLM's CPU build checks drafts."""

#: the variable that says that weight updates bring what an engine drafts with
REFRESHED = "HPCRL_DRAFTS_REFRESHED"
