"""What the checks share, and what they run with the Python of another program's environment."""
