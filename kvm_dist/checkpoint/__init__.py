"""Layout-free checkpoints. The names here need no torch; see also `.save`, `.load` and `.rng`."""

from kvm_dist.checkpoint.folder import CheckpointInfo, list_checkpoints, newest_valid, prune
from kvm_dist.checkpoint.manifest import Manifest, verify_checkpoint

__all__ = ["CheckpointInfo", "Manifest", "list_checkpoints", "newest_valid", "prune", "verify_checkpoint"]
