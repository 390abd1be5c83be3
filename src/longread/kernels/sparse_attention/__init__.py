"""Attention over chosen rows with one shared key-value head and a sink."""
