"""`warmroute bridge`: tells the bus what an engine of another kind has in its prefix cache."""
