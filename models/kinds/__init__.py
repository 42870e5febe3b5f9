"""The settings of every layer kind. Imports no torch."""

from models.kinds.block_window import BlockWindowConfig
from models.kinds.full_attention import FullAttentionConfig
from models.kinds.kvm import KVMConfig
from models.kinds.ovq import OVQConfig
from models.kinds.rwkv7 import RWKV7Config
from models.kinds.sliding_window import SlidingWindowConfig

__all__ = [
    "BlockWindowConfig",
    "FullAttentionConfig",
    "KVMConfig",
    "OVQConfig",
    "RWKV7Config",
    "SlidingWindowConfig",
]
