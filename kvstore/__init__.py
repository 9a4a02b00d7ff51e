"""Block identity, block format, tiers and transfers."""
