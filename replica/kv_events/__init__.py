"""The cache's changes as vLLM publishes them, for routers of other projects."""
