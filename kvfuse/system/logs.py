"""Where the daemon's log lines go: stderr, the journal, or a file of bounded size."""

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES_MAX = 10 << 20
LOG_FILES_KEPT = 3
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Log to stderr; without a time of its own where the journal adds one."""
    in_journal = "JOURNAL_STREAM" in os.environ
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(_LINE.removeprefix("%(asctime)s ") if in_journal else _LINE)
    )
    _install(handler)


def log_to_file(path: Path) -> None:
    """Log to *path*, and send stdout and stderr there too.

    At most 10 MiB are kept in the file, and three older ones beside it.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _RotatingFile(path)
    handler.setFormatter(logging.Formatter(_LINE))
    handler.take_standard_streams()
    _install(handler)


class _RotatingFile(RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            maxBytes=LOG_BYTES_MAX,
            backupCount=LOG_FILES_KEPT,
            encoding="utf-8",
            errors="backslashreplace",
        )

    def take_standard_streams(self) -> None:
        """Point stdout and stderr at the file, so that a crash of the interpreter is seen."""
        assert self.stream is not None, "opened when it was made"
        for number in (1, 2):
            os.dup2(self.stream.fileno(), number)

    def doRollover(self) -> None:
        super().doRollover()
        self.take_standard_streams()


def _install(handler: logging.Handler) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
