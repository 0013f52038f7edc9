"""The target's hidden states: computed in this process or by vLLM, written to a folder of shards, and read from one."""
