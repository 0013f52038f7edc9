"""The kinds of servers: one file each."""
