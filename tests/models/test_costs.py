import subprocess
import sys

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.budget import FixedBudget, PowerLawBudget, SaturatingBudget
from models.cache import CachedSequence, read
from models.config import KVMConfig, ModelConfig
from models.costs import model_costs
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered
from tests.models.shards import run_on_shards
from tests.models.tiny import RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_config, tiny_model

SPLIT_KINDS = ["kvm", "rwkv7", "sliding_window", "block_window", "ovq", *RECURRENCES, *SIMPLER_RECURRENCES]
KINDS = [*SPLIT_KINDS, "full_attention"]


@pytest.mark.parametrize("value_residual", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_exactly(kind: str, value_residual: bool) -> None:
    config = tiny_config([kind, kind], value_residual=value_residual, head_dim=24)
    model, costs = Backbone(config), model_costs(config, 128)

    assert costs.parameters == sum(p.numel() for p in model.parameters())
    for layer, row in zip(model.layers, costs.layers, strict=True):
        assert row.parameters == sum(p.numel() for p in layer.parameters())


def test_the_paper_s_sizes_are_found_again() -> None:
    small = ModelConfig(vocab_size=50304, layers=["kvm"], kvm=KVMConfig(budget=FixedBudget(slots=256)))
    large = small.model_copy(update={"hidden_size": 1024, "num_layers": 24, "num_heads": 8})
    for config, one_table, both in ((small, 123.6e6, 162e6), (large, 353.5e6, 405e6)):
        costs = model_costs(config, 8192)
        assert costs.parameters - costs.head_parameters == pytest.approx(one_table, rel=6e-3)
        assert costs.parameters == pytest.approx(both, rel=6e-3)


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_every_byte_over_a_shard_edge_is_counted(kind: str) -> None:
    ids, labels = tiny_batch(160, batch=1)
    _, _, (sent, _) = run_on_shards(tiny_model([kind, kind]), ids, labels, [96])

    assert model_costs(tiny_config([kind, kind]), 96).boundary_bytes == sum(size for _, _, size in sent)


@pytest.mark.parametrize("tokens", [40, 96, 101])
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_kept_for_decoding_is_counted(kind: str, tokens: int) -> None:
    cache = CachedSequence()
    with torch.no_grad():
        read(tiny_model([kind]), tiny_batch(tokens, batch=1)[0], cache)
    kept = sum(_bytes(entry) for name, entry in cache._entries.items() if not name.endswith("first_shift"))
    planned = model_costs(tiny_config([kind]), tokens).decode_state_bytes

    if kind == "ovq":  # its halo keeps a whole chunk's tokens, of which the open chunk's are needed
        assert planned <= kept
    else:
        assert planned == kept


def _bytes(entry: object) -> int:
    values = entry if isinstance(entry, tuple) else vars(entry).values()
    return sum(z.numel() * z.element_size() for z in values if isinstance(z, Tensor))


@pytest.mark.parametrize(
    "budget",
    [
        FixedBudget(slots=40),
        PowerLawBudget(factor=5, minimum=16),
        SaturatingBudget(limit=64, round_down=4),
    ],
    ids=lambda budget: budget.kind,
)
@pytest.mark.parametrize(("chunk", "window_chunks", "max_slots"), [(16, 2, None), (16, 1, 50), (8, 4, None)])
def test_slots_are_those_of_the_operator(
    budget: FixedBudget, chunk: int, window_chunks: int, max_slots: int | None
) -> None:
    config = KVMConfig(budget=budget, chunk=chunk, window_chunks=window_chunks, max_slots=max_slots)
    operator = KVMSettings(budget, chunk=chunk, window_chunks=window_chunks, max_slots=max_slots)
    for tokens in [*range(chunk), *range(chunk, 40 * chunk, chunk)]:
        assert config.slots_covering(tokens) == slots_covering(operator, tokens)
        read = tokens_covered(operator, tokens)
        assert config.slots_after(tokens) == slots_covering(operator, read)


def test_flops_grow_with_the_context_only_where_the_reads_do() -> None:
    def flops(kind: str, tokens: int) -> float:
        return model_costs(tiny_config([kind]), tokens).last_token_flops

    assert flops("rwkv7", 64) == flops("rwkv7", 4096)
    assert flops("sliding_window", 64) == flops("sliding_window", 4096)
    reads = 4 * 2 * 16  # QK and PV of two heads of 16 per key
    assert flops("full_attention", 4096) - flops("full_attention", 96) == 4000 * reads
    assert flops("kvm", 4096) > flops("kvm", 512)


def test_the_mean_over_a_sequence_is_that_of_its_tokens() -> None:
    config = tiny_config(["full_attention"])
    tokens = [model_costs(config, t).last_token_flops for t in range(1, 129)]
    assert model_costs(config, 128).mean_token_flops == pytest.approx(sum(tokens) / 128, rel=0.01)


def test_costs_need_no_torch() -> None:
    code = "import sys, models.costs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
