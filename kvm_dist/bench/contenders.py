"""The same tensors through KVM and through full attention, forward and backward, and token by token."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvm_dist.bench.results import Decoding, Timing
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION, REFERENCE, Setting
from models.kvm import KVMState, kvm_attention

PER_TOKEN = ("q", "k", "v", "merge_gate")
Inputs = dict[str, Tensor]


def make_inputs(setting: Setting, tokens: int) -> Inputs:
    """Random q, k, v [B, T, H, D] and gate [B, T, H], and the parameters as a layer starts with them."""
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (setting.batch, tokens, setting.heads, setting.width)
    inputs = {name: torch.randn(shape, generator=generator) for name in ("q", "k", "v")}
    inputs["merge_gate"] = torch.rand(shape[:3], generator=generator) + 0.5
    inputs["key_norm_weight"], inputs["key_norm_bias"] = torch.ones(setting.width), torch.zeros(setting.width)
    for name in ("state_temperature", "window_temperature"):
        inputs[name] = torch.ones(setting.heads)
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def grad_output(setting: Setting, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed + 1)
    return torch.randn(setting.batch, tokens, setting.heads, setting.width, generator=generator)


def kvm(setting: Setting, contender: str, inputs: Inputs, **more: Any) -> tuple[Tensor, KVMState | None]:
    arguments: dict[str, Any] = {
        **inputs,
        "budget": BUDGETS["KVM 16*sqrt" if contender == REFERENCE else contender],
        "chunk": setting.chunk,
        "window_chunks": setting.window_chunks,
        "rotary_dims": setting.rotary_dims,
        "backend": "reference" if contender == REFERENCE else "auto",
    }
    return kvm_attention(**arguments, **more)


def forward(setting: Setting, contender: str, inputs: Inputs) -> Tensor:
    """The output [B, T, H, D]."""
    if contender != FULL_ATTENTION:
        return kvm(setting, contender, inputs)[0]
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def time_training(
    setting: Setting, tokens: int, finished: Callable[[str], None] = lambda _: None
) -> list[Timing]:
    """Forward and backward of everybody at one length, taking turns; tells `finished` after each turn."""
    inputs, grad = make_inputs(setting, tokens), grad_output(setting, tokens)
    contenders = setting.contenders(tokens)
    rounds: dict[str, list[tuple[float, float]]] = {contender: [] for contender in contenders}
    for _ in range(setting.rounds(tokens)):
        for contender in contenders:
            for tensor in inputs.values():
                tensor.grad = None
            started = time.perf_counter()
            output = forward(setting, contender, inputs)
            turned = time.perf_counter()
            output.backward(grad)
            ended = time.perf_counter()
            rounds[contender].append((turned - started, ended - turned))
            finished(contender)
            del output
    return [
        Timing(contender, tokens, *(tuple(times) for times in zip(*turns, strict=True)))
        for contender, turns in rounds.items()
    ]


def warm_up(setting: Setting) -> None:
    """Load what the first call of each contender would load."""
    tokens = 3 * setting.chunk * setting.window_chunks
    inputs, grad = make_inputs(setting, tokens), grad_output(setting, tokens)
    for contender in (*BUDGETS, FULL_ATTENTION):
        forward(setting, contender, inputs).backward(grad)


def span(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {name: tensor[:, start:stop] if name in PER_TOKEN else tensor for name, tensor in inputs.items()}


@torch.no_grad()
def time_decoding(setting: Setting) -> Iterator[Decoding]:
    """A chunk of tokens one by one after `decode_context` tokens, so that one of them folds a chunk."""
    context, count = setting.decode_context, setting.chunk
    inputs = make_inputs(setting, context + count)
    for contender in BUDGETS:
        _, state = kvm(setting, contender, span(inputs, 0, context), return_state=True)
        seconds = []
        for token in range(context, context + count):
            one = span(inputs, token, token + 1)
            started = time.perf_counter()
            _, state = kvm(setting, contender, one, state=state, return_state=True)
            seconds.append(time.perf_counter() - started)
        assert state is not None, "asked for"
        yield Decoding(contender, context, tuple(seconds), state_bytes(state))
    yield _full_decoding(setting, inputs)


def _full_decoding(setting: Setting, inputs: Inputs) -> Decoding:
    """A preallocated heads-first cache, the fastest layout, without the cost of growing it."""
    context = setting.decode_context
    q, k, v = (inputs[name].transpose(1, 2).contiguous() for name in ("q", "k", "v"))
    seconds = []
    for token in range(context, context + max(setting.chunk // 8, 1)):
        one = q[:, :, token : token + 1], k[:, :, : token + 1], v[:, :, : token + 1]
        started = time.perf_counter()
        F.scaled_dot_product_attention(*one)
        seconds.append(time.perf_counter() - started)
    per_token = 2 * k[:, :, :1].nbytes
    return Decoding(FULL_ATTENTION, context, tuple(seconds), context * per_token)


def state_bytes(state: KVMState) -> int:
    tensors = (state.keys, state.values, state.magnitudes, state.window_keys, state.window_values)
    reads = () if state.reads is None else (state.reads.keys, state.reads.values)
    return sum(tensor.nbytes for tensor in (*tensors, *reads))


@torch.no_grad()
def pieces_error(setting: Setting, tokens: int) -> float:
    """Largest difference between a prefill in uneven pieces and one prefill, of the largest output."""
    inputs = make_inputs(setting, tokens)
    error = 0.0
    for contender in BUDGETS:
        whole, _ = kvm(setting, contender, inputs)
        state, start, outputs = None, 0, []
        while start < tokens:
            stop = min(tokens, start + setting.chunk * (1 + start % 3) + start % 7 + 1)
            output, state = kvm(setting, contender, span(inputs, start, stop), state=state, return_state=True)
            outputs.append(output)
            start = stop
        difference = (torch.cat(outputs, dim=1) - whole).abs().max() / whole.abs().max()
        error = max(error, difference.item())
    return error
