"""Messages to token ids: exact, cached, off the event loop."""
