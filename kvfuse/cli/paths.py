"""Directories as they are typed."""

import os

from kvfuse.core.errors import ConfigError


def absolute(argument: str, what: str) -> str:
    """Return the absolute path of the directory typed as *argument*; *what* names the argument.

    Raises:
        ConfigError: it is empty, as a variable of a script that was never set; the working
            directory is never meant by that.
    """
    if not argument:
        raise ConfigError(f"{what}: the path is empty; name a directory")
    return os.path.abspath(argument)
