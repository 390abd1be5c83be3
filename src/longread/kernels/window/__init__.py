"""V4's window: the last 128 tokens of each sequence, in a ring of one slot."""
