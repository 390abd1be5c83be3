"""Manifold-constrained hyper-connections."""
