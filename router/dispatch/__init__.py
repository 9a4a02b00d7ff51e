"""Carrying one request to a replica and its deltas back; going on elsewhere when it breaks."""
