"""Orders of service side by side: a trace through the real scheduler over a simulated device."""
