"""Blocks in a running LMCache server, through a process of another Python environment."""
