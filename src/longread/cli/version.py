"""The version of the installed distribution."""

import importlib.metadata


def version() -> str:
    """As in pyproject.toml; "unknown" when the source runs without being installed."""
    try:
        return importlib.metadata.version("longread")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
