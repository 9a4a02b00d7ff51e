"""The routes of whoever runs the gateway: state, tenants, revisions, hot heads, explain, warm."""
