"""The front beside the engine: in threads of one process, or in two processes."""
