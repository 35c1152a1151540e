"""The command ``kvfuse``: finds its subcommands when they are called, and reports failures.

Each failure is one line on stderr and the exit code of :mod:`kvfuse.core.errors`; with ``--json``
it is also an object on stdout.
"""

import importlib
from typing import IO, Any

import click

from kvfuse import __version__
from kvfuse.core.errors import EXIT_FAILED, EXIT_USAGE, KvfuseError
from kvfuse.output import asks_json, expect_json, fail, wants_json

COMMANDS = (
    "mount", "umount", "status", "locate", "disk", "clean",
    "tasks", "config", "doctor", "fsck", "upgrade", "bench",
)  # fmt: skip
EPILOG = """\b
Start here:
  kvfuse doctor                                        can this machine mount a pool?
  kvfuse mount /kvcache --disk /mnt/a --disk /mnt/b --init
  kvfuse status
  kvfuse umount /kvcache

\b
Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 not mounted,
  4 disk refused, 5 busy, 6 kernel or privilege missing.
"""


class UsageFailure(click.ClickException):
    """A command line that is not understood, told in one line as every failure is."""

    exit_code = EXIT_USAGE

    def __init__(self, error: click.UsageError, *, as_json: bool) -> None:
        command = error.ctx.command_path if error.ctx is not None else "kvfuse"
        said = " ".join(error.format_message().split()).rstrip(".")
        super().__init__(f"{said}{' See' if said.endswith('?') else '; see'}: {command} --help")
        self._as_json = as_json

    def show(self, file: IO[Any] | None = None) -> None:
        """Report it."""
        fail([self.message], self.exit_code, as_json=self._as_json)


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are used, or listed by ``--help``."""

    def __init__(self, *, modules: dict[str, str], hidden: dict[str, str], **attrs: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(**attrs)
        self._modules = modules
        self._hidden = hidden

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names that ``--help`` lists."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command *cmd_name*, imported now."""
        module = self._modules.get(cmd_name) or self._hidden.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command in *args*; an unknown one is told with the nearest that exists."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            nearest = nearest_of(args[0], self._modules)
            if not nearest or "Did you mean" in exc.message:
                raise
            raise click.UsageError(f"{exc.message} Did you mean '{nearest}'?", ctx) from exc

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        """Understand the words before the subcommand; what is not understood takes one line."""
        words = list(args)
        try:
            ctx = super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as exc:
            raise UsageFailure(exc, as_json=asks_json(words)) from exc
        expect_json(ctx, words)
        return ctx

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Run the subcommand; turn a failure into one line and an exit code."""
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as exc:
            raise UsageFailure(exc, as_json=wants_json(ctx)) from exc
        except click.Abort:
            fail(["aborted: the answer was no"], EXIT_FAILED, as_json=wants_json(ctx))
            ctx.exit(EXIT_FAILED)
        except KvfuseError as exc:
            fail(exc.lines, exc.exit_code, as_json=wants_json(ctx))
            ctx.exit(exc.exit_code)
        except BrokenPipeError:
            raise
        except OSError as exc:
            where = f"{exc.filename}: " if exc.filename else ""
            fail([f"{where}{exc.strerror or exc}"], EXIT_FAILED, as_json=wants_json(ctx))
            ctx.exit(EXIT_FAILED)


def nearest_of(word: str, known: Any) -> str:  # noqa: ANN401 - any collection of names
    """Return the one of *known* that looks most like *word*, "" when none does."""
    import difflib

    found = difflib.get_close_matches(word, list(known), 1)
    return found[0] if found else ""


@click.group(
    cls=LazyGroup,
    modules={name: f"kvfuse.cli.{name}" for name in COMMANDS},
    hidden={"daemon": "kvfuse.cli.daemon", "takeover-check": "kvfuse.cli.takeover_check"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.version_option(version=__version__, message="kvfuse %(version)s")
def cli() -> None:
    """One FUSE mount over many disks, for the KV caches of LLM serving engines."""
