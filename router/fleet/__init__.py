"""The replicas: who they are, how they do, how far they can be believed."""
