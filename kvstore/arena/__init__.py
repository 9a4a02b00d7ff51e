"""The host tier: blocks in memory that all replicas of a host share."""
