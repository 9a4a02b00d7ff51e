"""The daemon that owns a host's arena, and what its users talk to it with."""
