"""A net without a model: token shift, window mixing and a linear recurrence over a SequenceContext."""

import torch
from torch import Tensor, nn

from parallel.sequence.context import SequenceContext

WINDOW = 3


class ToyLayer(nn.Module):
    """All that crosses a shard edge: a halo of one, a halo of several tensors, a state of two tensors."""

    def __init__(self, width: int, keys: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.shift = nn.Parameter(torch.rand(width))
        self.project = nn.Linear(width, 3 * width + 2 * keys)
        self.decay = nn.Parameter(torch.rand(keys))
        self.keys = keys

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        batch, length, width = x.shape
        (before,) = context.halo(f"{self.name}.shift", (x,), 1)
        padded = torch.cat([x.new_zeros(batch, 1 - before.shape[1], width), before, x], dim=1)
        x = x + self.shift * padded[:, :-1]
        a, b, v, k, r = self.project(x).split([width, width, width, self.keys, self.keys], dim=2)

        transposed = a.transpose(1, 2).contiguous().transpose(1, 2)  # a tensor that is not contiguous
        before_a, before_b = context.halo(f"{self.name}.window", (transposed, b), WINDOW)
        missing = WINDOW - before_a.shape[1]
        whole = torch.cat([x.new_zeros(batch, missing, width), before_a * before_b, a * b], dim=1)
        window = whole.unfold(1, WINDOW + 1, 1).cumsum(-1).tanh().sum(-1)

        zeros = (x.new_zeros(batch, self.keys, width), x.new_zeros(batch, 1))
        state, count = context.receive(f"{self.name}.state", zeros)
        outputs = []
        for token in range(length):
            state = state * self.decay.sigmoid()[:, None] + k[:, token, :, None] * v[:, token, None, :]
            count = count + k[:, token].sum(-1, keepdim=True).tanh()
            outputs.append(torch.einsum("bk,bkv->bv", r[:, token], state) * (1 + 0.1 * count))
        window = context.send(f"{self.name}.state", (state, count), window)
        return x + 0.1 * torch.stack(outputs, dim=1) + 0.1 * window


class ToyNet(nn.Module):
    def __init__(self, layers: int = 2, width: int = 5, keys: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyLayer(width, keys, str(index)) for index in range(layers))

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        for layer in self.layers:
            x = layer(x, context)
        return x


def toy_net(seed: int = 0) -> ToyNet:
    torch.manual_seed(seed)
    return ToyNet().double()
