"""Rounds on a CPU as programs of inductor: one call instead of hundreds.

On a CPU much of a small batch's time goes into calling torch's operations one by one. Rounds look at no value on the
host, so that they can be traced whole: drafting, scoring, verification and commit become one program of C++, compiled
ahead of time, for each kind of batch and K, and kept between processes.
"""
