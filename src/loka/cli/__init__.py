"""The `loka` command."""


def main() -> None:
    """Entry point; imports late, so that a missing library is an error of the command alone."""
    from loka.cli.app import main as run

    run()
