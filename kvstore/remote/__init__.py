"""Connectors to stores that others run, behind the one tier protocol."""
