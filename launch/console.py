"""Where tables are printed. Imports no torch."""

import sys

from rich.console import Console

_FILE_COLUMNS = 400  # nothing is cut where there is no terminal to cut it for


def table_console() -> Console:
    """As wide as the terminal; in a file or a pipe as wide as the table."""
    return Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
