"""`warmroute kv`: looking after the host's shared KV memory."""
