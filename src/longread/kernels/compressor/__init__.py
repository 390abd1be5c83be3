"""Compressors of V4: many tokens pooled into one cached row."""
