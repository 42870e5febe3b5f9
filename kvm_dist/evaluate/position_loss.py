"""`position-loss`: mean loss of each block of tokens over long documents (arXiv 2605.09877, Fig. 4)."""

from typing import Any

import numpy as np

from kvm_dist.evaluate.documents import LongDocuments, after_separator, held_out_data
from kvm_dist.evaluate.reading import next_token_losses
from kvm_dist.evaluate.tasks import Options, Outcome, Watch
from kvm_dist.exit_codes import ConfigError
from kvm_dist.pretrained import Pretrained

DEFAULT_DOCUMENTS = 64


def evaluate(opened: Pretrained, options: Options, watch: Watch) -> Outcome:
    """Every document is read alone, after a separator, in pieces from one state to the next.

    As many tokens of each are read as all of them have, or --tokens; whole blocks count.
    """
    index = held_out_data(options.data, opened)
    minimum, block = options.minimum_tokens, options.block_tokens
    longest = options.one_length(minimum)
    if block > min(minimum, longest):
        raise ConfigError(
            f"--block-tokens {block}: no whole block in documents read up to {min(minimum, longest):,} tokens"
        )
    documents = LongDocuments(index, minimum, options.limit or DEFAULT_DOCUMENTS)
    total = sum(min(length, longest) for length in documents.lengths)
    losses, done = [], 0
    for document in documents:
        inputs, labels = after_separator(document[:longest], opened.tokenizer)
        found = next_token_losses(opened.model, inputs, labels)[0].double().cpu().numpy()
        losses.append(block_means(found, block))
        done += labels.numel()
        watch(done, total)
    blocks = summary(losses)
    return Outcome(
        {
            "loss": float(np.mean(np.concatenate(losses))),
            "first_block": blocks["mean"][0],
            "last_block": blocks["mean"][-1],
        },
        {"block_tokens": block, "blocks": blocks},
        {
            "data": str(index.directory),
            "data_digest": index.digest,
            "minimum_tokens": minimum,
            "tokens": longest,
            "documents": len(losses),
            "training_context": opened.training_context,
        },
        ("tokens", "loss, nats/token", "standard error", "quartiles", "documents"),
        _rows(blocks, block),
    )


def block_means(losses: np.ndarray, block_tokens: int) -> np.ndarray:
    """losses [tokens] -> the mean of each whole block, [blocks]."""
    whole = losses.size // block_tokens * block_tokens
    means: np.ndarray = losses[:whole].reshape(-1, block_tokens).mean(1)
    return means


def summary(losses: list[np.ndarray]) -> dict[str, list[Any]]:
    """Over documents, each [blocks] of any number, by block: mean, standard error, quartiles, documents.

    Nothing is known of the error of a mean over one document: None.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("mean", "standard_error", "lower_quartile", "upper_quartile", "documents")
    }
    for block in range(max(len(one) for one in losses)):
        values = np.array([one[block] for one in losses if len(one) > block])
        error = float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else None
        low, high = np.quantile(values, (0.25, 0.75))
        found["mean"].append(float(values.mean()))
        found["standard_error"].append(error)
        found["lower_quartile"].append(float(low))
        found["upper_quartile"].append(float(high))
        found["documents"].append(int(values.size))
    return found


def _rows(blocks: dict[str, list[Any]], block: int) -> list[tuple[str, ...]]:
    """The first block, and those that end where the position has doubled; the last."""
    count = len(blocks["mean"])
    errors = ["-" if error is None else f"{error:.4f}" for error in blocks["standard_error"]]
    shown = sorted({min(2**power, count) for power in range(count.bit_length() + 1)})
    return [
        (
            f"{(number - 1) * block:,} to {number * block:,}",
            f"{blocks['mean'][number - 1]:.4f}",
            errors[number - 1],
            f"{blocks['lower_quartile'][number - 1]:.4f} to {blocks['upper_quartile'][number - 1]:.4f}",
            f"{blocks['documents'][number - 1]}",
        )
        for number in shown
    ]
