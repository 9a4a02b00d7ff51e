"""HTTP: connections, bodies, the two generating routes, streams of answers."""
