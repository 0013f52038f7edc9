"""The foreign formats, found by being here: the modules with a `NAME`. The others are what several of them share.

A format's module is named after its family and its own NAME: `causal_lm_pard.py`, or `eagle.py` where the two are one.
`detect.Format` says what it provides, `destinations.Exporter` what it has if it can also be written. `remedy_for_vllm`
in the module of a family is what `--to vllm` can mend in its drafts (`destinations.Remedy`).
"""
