"""How commands answer: one JSON object for programs, tables and sentences for people.

A name that is not text is shown with backslash escapes, and never breaks the output.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
import msgspec

_F = TypeVar("_F", bound=Callable[..., Any])
_JSON_KEY = "kvfuse.json"
_PIPE_COLUMNS = 4096
_BAR_CELLS = 30


def json_option(command: _F) -> _F:
    """Add ``--json`` to *command* as the parameter ``as_json``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.find_root().meta[_JSON_KEY] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=remember,
        help="Answer with JSON on stdout; logs stay on stderr.",
    )(command)


def expect_json(ctx: click.Context, words: Sequence[str]) -> None:
    """Note whether *words*, of a command line not understood yet, ask for JSON."""
    ctx.meta[_JSON_KEY] = asks_json(words)


def asks_json(words: Sequence[str]) -> bool:
    """Whether ``--json`` is among the options in *words*."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def wants_json(ctx: click.Context) -> bool:
    """Whether the command that runs in *ctx* was given ``--json``."""
    return bool(ctx.find_root().meta.get(_JSON_KEY, False))


def printable(name: str | bytes) -> str:
    """Return *name* with what is not text, or would move the cursor, as backslash escapes."""
    raw = os.fsencode(name) if isinstance(name, str) else name
    text = raw.decode(errors="backslashreplace")
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def show_json(value: object) -> None:
    """Write *value* as JSON, on one line into a pipe and indented on a terminal."""
    raw = msgspec.json.encode(value)
    if sys.stdout.isatty():
        raw = msgspec.json.format(raw, indent=2)
    click.echo(raw.decode())


def say(text: str) -> None:
    """Write one line for people to stdout."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Write one line for people to stderr: progress, warnings."""
    click.echo(f"kvfuse: {printable(text)}", err=True)


def fail(lines: Sequence[str], exit_code: int, *, as_json: bool) -> None:
    """Report a failure: its lines on stderr, and for programs an object on stdout.

    Of several lines the object has a list as well.
    """
    for line in lines:
        note(line)
    if as_json:
        shown = [printable(line) for line in lines]
        answer: dict[str, object] = {"error": "\n".join(shown), "exit_code": exit_code}
        if len(shown) > 1:
            answer["errors"] = shown
        show_json(answer)


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Write a table; numbers align right where the header starts with a space."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for header in headers:
        table.add_column(
            header.strip(),
            justify="right" if header.startswith(" ") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def show_bar(text: str, share: float) -> None:
    """Draw on a terminal at stderr how much is done: *share* from 0 to 1, negative when unknown.

    The cursor is left at the beginning of the line, so that a line of the log goes over it; the
    last bar, with a share of 1, stays.
    """
    if sys.stderr.isatty():
        end = "\n" if share >= 1 else "\r"
        click.echo(f"\x1b[2K{bar(text, share)}{end}", err=True, nl=False)


def bar(text: str, share: float) -> str:
    """Return a line that shows how much is done, of at most 79 characters."""
    if share < 0:
        return printable(text)[:79]
    done = int(min(1.0, share) * _BAR_CELLS)
    cells = "#" * done + "." * (_BAR_CELLS - done)
    return f"[{cells}] {int(share * 100):3} % {printable(text)}"[:79]


def human_bytes(count: int) -> str:
    """Return *count* bytes in the largest unit of 1024 that leaves at least 1."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
