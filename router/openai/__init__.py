"""The OpenAI surface without HTTP: bytes to typed requests, deltas to chunks and bodies."""
