"""The engines that measure drafts, one file for each: draftkit's own, those that it starts, and servers that run."""
