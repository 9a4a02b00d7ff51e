"""Servers of other kinds as replicas: any OpenAI-compatible one; bytes are relayed, not parsed."""
