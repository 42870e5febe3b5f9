"""Experiment tracking that can neither stop nor slow a step. Imports no mlflow; see `.store` for that."""

from kvm_dist.tracking.tracker import NullTracker, Tracker

__all__ = ["NullTracker", "Tracker"]
