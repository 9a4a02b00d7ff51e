"""What one delta costs the router, from the link's frame to the client's socket."""
