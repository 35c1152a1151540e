"""The configuration as the command line sees it: file, environment, options."""

import os
from pathlib import Path

from kvfuse.core.config import COMMAND_LINE, Resolved, parse
from kvfuse.core.errors import ConfigError

_FILE_BYTES_MAX = 1 << 20


def resolve(config_file: str | None, flags: dict[str, object]) -> Resolved:
    """Return the configuration of *config_file*, under the environment, under *flags*.

    Raises:
        ConfigError: the file cannot be read, or something in it or in the others is wrong.
    """
    text = None if config_file is None else _read(config_file)
    return parse(text, source=config_file or COMMAND_LINE, environment=os.environ, flags=flags)


def resolve_file(config_file: str) -> Resolved:
    """Return what *config_file* says by itself.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    return parse(_read(config_file), source=config_file, environment={}, flags={})


def _read(config_file: str) -> str:
    if not config_file:
        raise ConfigError("--config: the path is empty; name a file")
    try:
        with Path(config_file).open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"{config_file}: cannot be read: {exc.strerror}") from exc
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError(f"{config_file}: over {_FILE_BYTES_MAX} bytes; no configuration file")
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{config_file}: byte {exc.start} is not UTF-8; save it as UTF-8"
        ) from exc
