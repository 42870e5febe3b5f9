"""Models with their Hugging Face face: one of every family, and hybrids."""

import torch

from models.backbone import Backbone
from models.budget import PowerLawBudget
from models.config import KVMConfig
from models.hf import KVMDistConfig, KVMDistForCausalLM
from tests.models.golden import golden_model
from tests.models.tiny import RECURRENCES, SIMPLER_RECURRENCES, tiny_model

GOLDEN_FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]
HYBRIDS = {
    "kvm/rwkv7": ["kvm", "rwkv7"],  # chunks of 16 tokens, window of 32, a budget of 3 sqrt(tokens)
    "all kinds": ["kvm", "sliding_window", "full_attention", "block_window", "ovq", "rwkv7"],
    "recurrences": [*RECURRENCES, *SIMPLER_RECURRENCES, "kvm"],
}
GROUPED = KVMConfig(chunk=8, budget=PowerLawBudget(factor=3, minimum=8), kv_heads=1)
FAMILIES = [*GOLDEN_FAMILIES, *HYBRIDS]


def backbone(family: str) -> Backbone:
    """A model whose most likely token depends on its context: those of the authors say one all the time."""
    if family in GOLDEN_FAMILIES:
        model = golden_model(family).model
        with torch.no_grad():
            model.embedding.weight.normal_(generator=torch.Generator().manual_seed(3))
            model.norm_head.bias.zero_()
        return model
    return tiny_model(HYBRIDS[family], **({"kvm": GROUPED} if family == "recurrences" else {}))


def face(family: str) -> KVMDistForCausalLM:
    """The family's model in evaluation mode."""
    return dressed(backbone(family))


def dressed(model: Backbone) -> KVMDistForCausalLM:
    face = KVMDistForCausalLM(KVMDistConfig(model.config))
    face.backbone.load_state_dict(model.state_dict())
    return face.eval()
