"""Entry point of ``kvfuse`` and ``python -m kvfuse``."""

from kvfuse.cli.group import cli


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    cli(prog_name="kvfuse")


if __name__ == "__main__":
    main()
