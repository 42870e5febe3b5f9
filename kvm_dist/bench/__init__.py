"""Measured tables: what the parts of a run cost on this machine."""
