"""The text of a file that a user named: regular, of bounded size, UTF-8. Knows no format."""

import stat
from pathlib import Path

from longread.spec.errors import ConfigError


def read_given(path: Path, most: int, what: str) -> str:
    """At most ``most`` bytes of ``path``, which should be ``what`` ("a result file").

    Raises ``FileNotFoundError``, and ``ConfigError``: a folder, a pipe or device (reading would wait, or never end),
    too large, not UTF-8, or not readable.
    """
    shown = str(path) if len(str(path)) <= 200 else f"...{str(path)[-190:]}"
    try:
        place = path.expanduser()
        found = place.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{shown} is a folder; give {what}")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{shown} is a pipe or a device; give {what} as a regular file")
        with place.open("rb") as file:
            data = file.read(most + 1)  # it may grow meanwhile, or say 0 as files of /proc do
        if len(data) > most:
            raise ConfigError(f"{shown}: more than {most:,} bytes are not {what}")
        return data.decode("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8: {str(error)[:200]}") from None
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, ~nobody
        raise ConfigError(f"{shown}: {getattr(error, 'strerror', None) or error}") from None
