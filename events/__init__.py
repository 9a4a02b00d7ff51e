"""The words that cross processes, the digest codec, and the bus that carries them."""
