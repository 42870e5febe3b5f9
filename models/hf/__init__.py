"""The Hugging Face face: `import models.hf` makes AutoConfig and AutoModelForCausalLM know `kvm_dist`."""

from models.hf.cache import KVMDistCache
from models.hf.configuration import KVMDistConfig
from models.hf.modeling import KVMDistForCausalLM
from models.hf.tokenizer_world import KVMDistWorldTokenizer

__all__ = ["KVMDistCache", "KVMDistConfig", "KVMDistForCausalLM", "KVMDistWorldTokenizer"]
