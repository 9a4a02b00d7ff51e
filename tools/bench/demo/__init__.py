"""The demo: the same agents' traffic under several routing policies, on real replicas."""
