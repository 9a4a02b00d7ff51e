"""Printing tables: wider than the terminal rather than with figures cut off."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MOST_COLUMNS = 1_000


def print_table(console: Console, table: Table) -> None:
    """At the width that it needs: a pipe counts as 80 columns, and would lose the rest."""
    room = console.options.update(width=MOST_COLUMNS)
    needed = Measurement.get(console, room, table).maximum
    console.width = max(console.width, needed)
    console.print(table)
