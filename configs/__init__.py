"""Typed configuration, presets, and what a model file says of itself."""
