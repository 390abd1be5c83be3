"""Sweeps: one quantity of the load varied, the rest kept: the knee, the most load under an SLO, the frontier."""
