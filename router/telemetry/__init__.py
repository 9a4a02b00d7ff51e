"""Metrics, alarms, what was predicted against what came true, and telling the bus."""
