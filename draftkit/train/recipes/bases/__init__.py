"""What recipes of one family share; a file for each family."""
