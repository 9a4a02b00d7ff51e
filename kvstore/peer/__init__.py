"""Blocks of another host's arena, over framed TCP: served by its kvd, pulled by others."""
