"""Revisions of the model: their shares, how they do, copies for comparison."""
