"""One file per kernel: the Triton kernel, its torch reference, and the dispatcher between them."""
