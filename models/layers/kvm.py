"""The Key-Value-Means mixer: the operator with its gate, state norm and temperatures (arXiv 2605.09877)."""

import torch
from torch import Tensor, nn

from models.config import KVMConfig, ModelConfig
from models.initialise import linear_default_
from models.kvm import kvm_attention
from models.kvm.node_inputs import NodeInputs
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext
from parallel.sequence.named import NamedExchange, named_split


class KVM(AttentionMixer):
    """Attention to a block window and to the slots of a growing state."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        config = settings(model, index, KVMConfig)
        heads = config.key_value_heads(model)
        super().__init__(model, index, config.rotary(model.head_width), heads)
        self.config, self.state_heads = config, heads
        self.state_norm_weight = nn.Parameter(torch.empty(model.head_width))
        self.state_norm_bias = nn.Parameter(torch.empty(model.head_width))
        self.gate = nn.Linear(model.hidden_size, heads, bias=False) if config.merge_gate else None
        self.window_temperature: nn.Parameter | None = None
        self.state_temperature: nn.Parameter | None = None
        if config.head_temperatures:
            self.window_temperature = nn.Parameter(torch.empty(heads))
            self.state_temperature = nn.Parameter(torch.empty(heads))

    def mix(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        split = named_split(context.head_split, str(self.index))
        inputs = NodeInputs.of(split, self.state_heads)
        gate = None if self.gate is None else merge_gate(self.gate(x))
        if inputs is not None and gate is not None:
            gate = inputs.start("gate", gate)
        ready = {} if inputs is None else {"ready": inputs.start}
        heads: QueriesKeysValues = self.projections(x, first_value, context, **ready)
        out, state = kvm_attention(
            *heads,
            gate,
            self.state_norm_weight,
            self.state_norm_bias,
            self.state_temperature,
            self.window_temperature,
            budget=self.config.budget,
            chunk=self.config.chunk,
            window_chunks=self.config.window_chunks,
            sinks=self.config.sinks,
            rotary_dims=self.projections.rotary_dims,
            max_slots=self.config.max_slots,
            gate_appends=self.config.gate_appends,
            gate_first_state=self.config.gate_first_state,
            value_radius=self.config.value_radius,
            state=context.load(self.name),
            return_state=context.keeps_state,
            backend=self.config.backend,
            exchange=NamedExchange(context.exchange, str(self.index)),
            start=context.start,
            head_split=split,
            inputs=inputs,
        )
        context.store(self.name, state)
        return out

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        nn.init.ones_(self.state_norm_weight)
        nn.init.zeros_(self.state_norm_bias)
        if self.gate is not None:
            linear_default_(self.gate.weight, generator)
        for temperature in (self.window_temperature, self.state_temperature):
            if temperature is not None:
                nn.init.ones_(temperature)


def merge_gate(logits: Tensor) -> Tensor:
    """`1 + ELU(logits)`, written with exp: the ELU kernel rounds differently at the end of a tensor, so a
    gate would depend on where a sequence is cut."""
    return logits.relu() + logits.clamp(max=0).exp()
