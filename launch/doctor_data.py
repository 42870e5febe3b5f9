"""Whether the data of a run is there, its own, and well mixed. Imports no torch."""

from collections.abc import Iterator
from statistics import median_high

from kvm_dist.config import RunConfig
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.data.index import INDEX_NAME, DatasetIndex
from kvm_dist.data.order import SequenceOrder
from kvm_dist.exit_codes import DataError
from launch.finding import Finding

FEWEST_SHUFFLED_STEPS = 10  # that the sequences of a pool last for
FEWEST_SHUFFLED_SHARDS = 4  # of which a pool is mixed, where there are more


def check_data(config: RunConfig) -> Iterator[Finding]:
    """Whether the data of a run is there and its own, and how well it is mixed."""
    path, source = config.data.path, config.data.source
    if source is not None and not (path / INDEX_NAME).is_file():
        yield Finding("data", "ok", f"{path} will be prepared from {source} on first use")
        return
    try:
        index = ensure_prepared(config.data, config.model.vocab_size)
        yield _shuffled(config, index)
    except DataError as error:
        yield Finding("data", "fail", str(error), "see there; `kvm-dist data check DIR` reads every shard")


def _shuffled(config: RunConfig, index: DatasetIndex) -> Finding:
    """Sequences are mixed within pools of shards: small pools follow the order of the source."""
    data, shards = config.data, index.split("train")
    order = SequenceOrder(
        shards,
        sequence_length=data.sequence_length,
        shuffle_tokens=data.shuffle_tokens,
        seed=config.seed,
    )
    pools = order.pools(0)
    sequences = median_high(pool.sequences for pool in pools)
    mixed = median_high(len(pool.shards) for pool in pools)
    steps = sequences / config.train.batch_sequences
    epochs = config.train.steps * config.train.batch_sequences / order.epoch_sequences(0)
    found = f"{index.tokens('train'):,} tokens, {epochs:.2g} epochs in this run; "
    if len(pools) == 1:
        return Finding("data", "ok", found + "all of it is shuffled together")
    found += f"shuffled together: {mixed} of {len(shards)} shards at a time, for {steps:.3g} steps"
    if steps < FEWEST_SHUFFLED_STEPS or mixed < FEWEST_SHUFFLED_SHARDS:
        fix = "neighbours in the source stay near each other; raise data.shuffle_tokens (memory of a rank)"
        return Finding("data", "warn", found, fix)
    return Finding("data", "ok", found)
