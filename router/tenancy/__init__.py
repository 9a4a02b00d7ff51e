"""Who comes in, within which limits, what they share, and what they used."""
