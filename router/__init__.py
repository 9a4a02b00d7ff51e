"""The gateway: OpenAI surface, tenants, rendering, index, cost, choice, dispatch."""
