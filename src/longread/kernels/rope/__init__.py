"""Rotary position embedding, plain and YaRN."""
