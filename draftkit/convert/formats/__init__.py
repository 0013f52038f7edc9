"""The foreign formats: one module each, found by name.

A format module has `NAME`, `TITLE`, `recognize(checkpoint) -> bool` and `plan(checkpoint, target) -> Plan`.
"""
