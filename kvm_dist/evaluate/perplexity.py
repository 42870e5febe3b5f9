"""`perplexity`: loss, perplexity and bits per byte over held-out documents, packed as in training."""

import math

from kvm_dist.data.loader import MicroBatch
from kvm_dist.evaluate.documents import PackedSequences, held_out_data, row_bytes
from kvm_dist.evaluate.reading import next_token_losses, rows_at_once
from kvm_dist.evaluate.tasks import Options, Outcome, Watch
from kvm_dist.pretrained import Pretrained
from models.loss import IGNORED_LABEL

_LARGEST_LOSS = 700.0  # whose exponential is a float


def evaluate(opened: Pretrained, options: Options, watch: Watch) -> Outcome:
    """Every token of the held-out documents, and the separator behind each, is predicted once.

    At the training context it is the `validation/loss` of training over all its sequences.
    """
    config = opened.config
    index = held_out_data(options.data, opened)
    context = options.one_length(config.data.sequence_length)
    packed = PackedSequences(index, context, config.data.shuffle_tokens, options.limit)
    nats, tokens, size, done = 0.0, 0, 0, 0
    for batch in packed.batches(rows_at_once(opened.model, context)):
        nats += float(next_token_losses(opened.model, batch.inputs, batch.labels).double().sum())
        scored = batch.labels[batch.labels != IGNORED_LABEL].numpy()
        tokens += scored.size
        size += _bytes(opened, batch)
        done += batch.inputs.numel()
        watch(done, packed.sequences * context)
    loss = nats / tokens
    perplexity = math.inf if loss > _LARGEST_LOSS else math.exp(loss)
    metrics = {"loss": loss, "perplexity": perplexity, "bits_per_byte": nats / math.log(2) / max(size, 1)}
    counts = {"tokens": tokens, "bytes": size, "sequences": packed.sequences}
    return Outcome(
        metrics,
        counts,
        {"data": str(index.directory), "data_digest": index.digest, "context": context},
        ("context", "tokens", "loss, nats/token", "perplexity", "bits/byte"),
        [
            (
                f"{context:,}",
                f"{tokens:,}",
                f"{loss:.4f}",
                f"{metrics['perplexity']:.4g}",
                f"{metrics['bits_per_byte']:.4f}",
            )
        ],
    )


def _bytes(opened: Pretrained, batch: MicroBatch) -> int:
    """Of the texts that the labels of a batch are."""
    rows = zip(batch.inputs[:, 0].tolist(), batch.labels.numpy(), strict=True)
    return sum(row_bytes(opened.tokenizer, before, ids[ids != IGNORED_LABEL]) for before, ids in rows)
