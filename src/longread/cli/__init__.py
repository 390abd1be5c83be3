"""Argument parsing only; a command imports the rooms it needs when it runs."""
