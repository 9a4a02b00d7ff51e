"""Prompts computed by one replica and answered by another one, where that costs less than both at
one place. Everything that goes wrong on the way costs time only: the one that answers computes."""
