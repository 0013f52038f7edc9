"""Attacks that can be run again, one script for each kind of input: `python -m scripts.attack.NAME --cases 1000`.

`_count` runs the cases and says how they end.
"""
