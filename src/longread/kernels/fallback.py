"""Tells, once each, where a device runs a reference instead of its kernel, and why."""

import logging
from functools import cache

log = logging.getLogger(__name__)


@cache
def fallback(op: str, reason: str) -> None:
    """Note that ``op`` runs as its reference because of ``reason``; said once for each pair."""
    log.info("%s runs as its reference: %s", op, reason)
