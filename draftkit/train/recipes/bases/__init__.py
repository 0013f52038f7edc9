"""What recipes share: a file for each family that has several, chains, and how new drafts begin."""
