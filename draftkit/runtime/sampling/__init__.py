"""Sampling and verification: one file per verification mode, all with the signature of `verdict.Verify`.

Everything here is a function of tensors of fixed shapes: no synchronisation with the host, no global random state, no
branch on a tensor's values, so that a CUDA graph can hold it.
"""
