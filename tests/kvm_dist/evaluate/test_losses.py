"""The tasks perplexity and position-loss, against the same numbers found another way."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvm_dist.data.index import load_index
from kvm_dist.data.shards import split_documents
from kvm_dist.data.tokenizer import ByteTokenizer, RWKVWorldTokenizer
from kvm_dist.data.validation import ValidationBatches
from kvm_dist.evaluate import perplexity, position_loss
from kvm_dist.evaluate.documents import LongDocuments, held_out_data, row_bytes, texts
from kvm_dist.evaluate.position_loss import block_means, summary
from kvm_dist.evaluate.tasks import Options
from kvm_dist.exit_codes import ConfigError, DataError
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.kvm_dist.evaluate.conftest import nobody_watches
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun


def held_out(run: TinyRun) -> list[np.ndarray]:
    return list(split_documents(load_index(run.data), "validation"))


def test_every_held_out_token_and_separator_is_scored_once(tiny_run: TinyRun) -> None:
    documents = held_out(tiny_run)
    size = sum(document.size for document in documents)
    outcome = perplexity.evaluate(tiny_run.open(), Options(), nobody_watches)
    assert outcome.details["bytes"] == size
    assert outcome.details["tokens"] == size + len(documents)
    loss, tokens = outcome.metrics["loss"], outcome.details["tokens"]
    assert outcome.metrics["perplexity"] == pytest.approx(math.exp(loss))
    assert outcome.metrics["bits_per_byte"] == pytest.approx(loss * tokens / size / math.log(2))


def test_the_loss_is_that_of_whole_forwards_over_the_sequences_of_validation(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "rows_at_once", lambda model, tokens: 4)
    data = tiny_run.open().config.data
    sequences = ValidationBatches(
        load_index(tiny_run.data), sequence_length=450, shuffle_tokens=data.shuffle_tokens, sequences=10**9
    )
    nats, tokens = 0.0, 0
    for batch in sequences:
        with torch.no_grad():
            logits = tiny_run.model(batch.inputs, WholeSequence())
        total, valid = token_losses(logits, batch.labels)
        nats, tokens = nats + float(total), tokens + int(valid)
    outcome = perplexity.evaluate(tiny_run.open(), Options(tokens=(450,)), nobody_watches)
    assert outcome.details["sequences"] == len(sequences) > 10
    assert outcome.details["tokens"] == tokens
    assert outcome.metrics["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    some = perplexity.evaluate(tiny_run.open(), Options(tokens=(450,), limit=2), nobody_watches)
    assert (some.details["sequences"], some.details["tokens"]) == (2, 900)


def test_the_loss_of_a_block_is_its_mean_over_documents_read_alone(tiny_run: TinyRun) -> None:
    options = Options(minimum_tokens=900, block_tokens=200)
    outcome = position_loss.evaluate(tiny_run.open(), options, nobody_watches)
    documents = [document for document in held_out(tiny_run) if document.size >= 900]
    means = []
    for document in documents:
        ids = torch.tensor([[0, *document[:900].tolist()]])
        with torch.no_grad():
            logits = tiny_run.model(ids[:, :-1], WholeSequence())
        means.append(F.cross_entropy(logits[0], ids[0, 1:], reduction="none")[:800].view(4, 200).mean(1))
    blocks = outcome.details["blocks"]
    assert blocks["mean"] == pytest.approx(torch.stack(means).mean(0).tolist(), rel=1e-5)
    assert blocks["documents"] == [len(documents)] * 4
    assert outcome.metrics["first_block"] == blocks["mean"][0]
    assert outcome.metrics["last_block"] == blocks["mean"][-1]


def test_positions_that_only_some_documents_reach_count_those(tiny_run: TinyRun) -> None:
    options = Options(minimum_tokens=300, tokens=(1200,), block_tokens=300)
    outcome = position_loss.evaluate(tiny_run.open(), options, nobody_watches)
    sizes = [document.size for document in held_out(tiny_run)]
    reached = [sum(size >= 300 * number for size in sizes) for number in (1, 2, 3, 4)]
    assert outcome.details["blocks"]["documents"] == reached
    assert reached[0] > reached[-1] > 0


def test_the_band_of_a_block_is_over_its_documents() -> None:
    found = summary([np.array([1.0, 5.0]), np.array([2.0]), np.array([4.0, 7.0, 3.0]), np.array([9.0])])
    assert found["mean"] == [4.0, 6.0, 3.0]
    assert found["standard_error"][:2] == pytest.approx([np.std([1, 2, 4, 9], ddof=1) / 2, 1.0])
    assert found["standard_error"][2] is None, "one document says nothing of the error"
    assert (found["lower_quartile"][0], found["upper_quartile"][0]) == (1.75, 5.25)
    assert found["documents"] == [4, 2, 1]


def test_a_block_that_a_document_does_not_fill_is_left_out() -> None:
    assert block_means(np.array([1.0, 3.0, 5.0, 7.0, 100.0]), 2).tolist() == [2.0, 6.0]


def test_data_without_long_documents_names_its_longest(tiny_run: TinyRun) -> None:
    longest = max(document.size for document in held_out(tiny_run))
    with pytest.raises(
        DataError, match=rf"at least 32,768 tokens; its longest has {longest:,}.*--minimum-tokens"
    ):
        position_loss.evaluate(tiny_run.open(), Options(), nobody_watches)
    index = load_index(tiny_run.data)
    assert LongDocuments(index, longest, None).lengths == [longest]
    with pytest.raises(ConfigError, match="--block-tokens 1024: no whole block"):
        position_loss.evaluate(tiny_run.open(), Options(minimum_tokens=500), nobody_watches)


def test_missing_data_and_contexts_without_enough_of_it_are_errors_of_the_data(tiny_run: TinyRun) -> None:
    opened = tiny_run.open("data.path=elsewhere")
    with pytest.raises(DataError, match=r"no prepared data at data\.path=elsewhere.*--data DIR"):
        held_out_data(None, opened)
    assert held_out_data(tiny_run.data, opened).digest
    with pytest.raises(DataError, match="fewer than one context of 9,999,999"):
        perplexity.evaluate(tiny_run.open(), Options(tokens=(9_999_999,)), nobody_watches)
    with pytest.raises(ConfigError, match="one length"):
        perplexity.evaluate(tiny_run.open(), Options(tokens=(1, 2)), nobody_watches)


def test_bytes_are_counted_of_text_alone(world: RWKVWorldTokenizer) -> None:
    assert row_bytes(ByteTokenizer(), 0, np.frombuffer("né\0à\xff".encode("latin-1"), np.uint8)) == 4
    ids = np.concatenate([world.encode("déjà vu"), np.array([world.separator_id], np.uint16)])
    assert row_bytes(world, 0, ids) == len("déjà vu".encode())


def test_text_comes_from_the_source_then_the_data_then_the_standard_library(tiny_run: TinyRun) -> None:
    tokenizer = ByteTokenizer()
    source = tiny_run.data.parent / "texts" / "003.txt"
    assert texts(source, tiny_run.data, tokenizer, 10) == ([source.read_text()], str(source))
    found, origin = texts(None, tiny_run.data, tokenizer, 10)
    assert found == [tokenizer.decode(held_out(tiny_run)[0])]
    assert "held-out documents" in origin
    found, origin = texts(None, tiny_run.data / "absent", tokenizer, 10)
    assert origin == "python-stdlib"
    assert found
