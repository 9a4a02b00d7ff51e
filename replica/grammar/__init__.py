"""Constrained answers: grammars compiled off the loops, followed token by token. Torch-free."""
