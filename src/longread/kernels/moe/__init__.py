"""Gated feed-forward networks: one, or many behind a router."""
