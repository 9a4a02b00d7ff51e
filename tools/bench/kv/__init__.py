"""What the tiers of the KV store cost, each beside the plainest way to move the same bytes."""
