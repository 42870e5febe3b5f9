"""`torch.compile` leaves the operator alone and a model around it right."""

import subprocess
import sys

import torch
from torch import Tensor, nn

from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_batch, tiny_model


def test_a_compiled_model_of_two_kvm_layers_gives_the_bits_of_an_eager_one() -> None:
    torch.compiler.reset()
    model = tiny_model(["kvm", "kvm"])
    ids, _ = tiny_batch(tokens=75)

    def step(one: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        logits: Tensor = one(ids, WholeSequence())
        logits.square().mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return logits.detach(), grads

    logits, grads = step(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled_logits, compiled_grads = step(torch.compile(model, backend=keep))  # type: ignore[arg-type]
    assert graphs, "nothing was compiled"
    assert torch.equal(compiled_logits, logits)
    assert compiled_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(compiled_grads[name], grad), name


def test_importing_the_operator_imports_no_compiler() -> None:
    code = "import sys, models.kvm; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
