"""Targets: opening and running them, what they cost, where they lie, what the runtime takes of them."""
