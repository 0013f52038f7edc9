"""What vLLM 0.32 makes of each family of drafts: one file each, found by being here."""
