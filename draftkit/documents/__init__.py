"""Documents: the tokens that a target has written, and the vocabulary they need. Read for training and for surgery."""
