"""The settings of every layer kind. Imports no torch."""

from models.kinds.block_window import BlockWindowConfig
from models.kinds.deltanet import DeltaNetConfig
from models.kinds.full_attention import FullAttentionConfig
from models.kinds.gated_deltanet import GatedDeltaNetConfig
from models.kinds.gla import GLAConfig
from models.kinds.kda import KDAConfig
from models.kinds.kvm import KVMConfig
from models.kinds.mamba2 import Mamba2Config
from models.kinds.ovq import OVQConfig
from models.kinds.rwkv7 import RWKV7Config
from models.kinds.sliding_window import SlidingWindowConfig

__all__ = [
    "BlockWindowConfig",
    "DeltaNetConfig",
    "FullAttentionConfig",
    "GLAConfig",
    "GatedDeltaNetConfig",
    "KDAConfig",
    "KVMConfig",
    "Mamba2Config",
    "OVQConfig",
    "RWKV7Config",
    "SlidingWindowConfig",
]
