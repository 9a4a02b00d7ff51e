"""`warmroute up`: a whole cluster on this machine, from one command, until Ctrl-C."""

from __future__ import annotations

from tools.up.command import main

__all__ = ["main"]
