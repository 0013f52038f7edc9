"""Attacks that can be run again, one script for each kind of input: `python scripts/attack/NAME.py --cases 1000`.

`_count` runs the cases and says how they end. A script puts the repository, its `tests` and its `scripts` in the place
of its own folder on `sys.path`, so that `gguf.py` here does not hide the package of that name.
"""
