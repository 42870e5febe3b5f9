"""The memory of a model over a document: the watching changes nothing, and everything can be shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvm_dist.config import RunConfig
from kvm_dist.data.index import load_index
from kvm_dist.data.shards import split_documents
from kvm_dist.data.tokenizer import ByteTokenizer
from kvm_dist.evaluate import memory_watch
from kvm_dist.evaluate.memory import evaluate
from kvm_dist.evaluate.memory_slots import heat
from kvm_dist.evaluate.memory_summary import quantiles
from kvm_dist.evaluate.memory_watch import LayerMemory, read_document, watched
from kvm_dist.evaluate.tasks import Options, Outcome
from kvm_dist.exit_codes import ConfigError
from kvm_dist.plots.canvas import label_counts, new_figure, plain
from kvm_dist.plots.memory import _other_state, draw
from kvm_dist.plots.memory_slots import _cells, _fitting, _spread
from kvm_dist.pretrained import Pretrained
from models.cache import CachedSequence, read
from models.config import KVMConfig
from models.kvm.inspection import BlockRead
from models.kvm.layout import Block, KVMSettings
from tests.kvm_dist.evaluate.conftest import nobody_watches
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun
from tests.kvm_dist.test_plots import size_of
from tests.models.tiny import HYBRID, tiny_batch, tiny_config, tiny_model

TEXT = "".join(f"def f{number}(x):\n\treturn x + {number} * $y$\n" for number in range(40))


def row_of(outcome: Outcome, layer: str) -> dict[str, str]:
    (row,) = (row for row in outcome.rows if row[0] == layer)
    return dict(zip(outcome.columns, row, strict=True))


def opened_with(layers: list[str], **changes: Any) -> Pretrained:
    model = tiny_model(layers, vocab_size=256, **changes)
    settings = tiny_config(layers, vocab_size=256, **changes)
    config = RunConfig(name="tiny", model=settings, data={"sequence_length": 256})
    return Pretrained(model.eval(), config, ByteTokenizer(), torch.device("cpu"), 7, Path("tiny"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("text") / "some.py"
    path.write_text(TEXT)
    (path.parent / "other.py").write_text(TEXT.upper())
    return path


@pytest.fixture(scope="module")
def outcome(text: Path) -> Outcome:
    return evaluate(opened_with(HYBRID), Options(haystack=text), nobody_watches)


def test_watching_changes_neither_what_a_model_says_nor_the_model() -> None:
    model = tiny_model(HYBRID)
    ids, _ = tiny_batch(75, batch=1)
    with torch.no_grad():
        wanted = read(model, ids, CachedSequence())
        with watched(model) as layers:
            seen = read(model, ids, CachedSequence())
    assert torch.equal(seen, wanted)
    assert [layer.name for layer in layers] == ["0.kvm", "3.kvm"]
    assert [len(layer.reads) for layer in layers] == [5, 5]
    assert not any("attend" in vars(block.mixer) for block in model.layers)


def test_a_document_read_in_pieces_leaves_the_state_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(HYBRID).double()
    tokens = tiny_batch(150, batch=1)[0][0]
    monkeypatch.setattr(memory_watch, "LEAST_PIECES", 1)
    whole = read_document(model, tokens)
    monkeypatch.setattr(memory_watch, "PIECE_TOKENS", 20)
    pieces = read_document(model, tokens)
    one, other = (found.other_states["1.rwkv7"] for found in (whole, pieces))
    assert (one.positions, other.positions) == ([150], [32, 64, 96, 128, 150])
    assert one.values[-1] == pytest.approx(other.values[-1])
    for layer, cut in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(layer.lives.tokens, cut.lives.tokens)
        assert layer.state is not None
        assert cut.state is not None
        torch.testing.assert_close(layer.state.keys, cut.state.keys)
        assert layer.state.radii is not None
        assert layer.lives.tokens.shape == layer.state.radii.shape[1:]
        torch.testing.assert_close(layer.reads[-1].by_slot, cut.reads[-1].by_slot)


def test_other_kinds_say_how_large_their_state_is() -> None:
    found = read_document(
        tiny_model(["kvm", "ovq", "rwkv7", "full_attention"]), tiny_batch(64, batch=1)[0][0]
    )
    assert [one.measure for one in found.other_states.values()] == ["centroids", "norm of the state"]
    assert found.other_states["1.ovq"].positions == [32, 64]
    assert found.other_states["1.ovq"].values == [13, 17]


def test_an_error_while_watching_leaves_the_model_as_it_was() -> None:
    model = tiny_model(["kvm"])
    with pytest.raises(KeyError), watched(model):
        raise KeyError
    assert "attend" not in vars(model.layers[0].mixer)


def test_the_numbers_of_a_document_agree_with_each_other(outcome: Outcome) -> None:
    details = outcome.details
    json.dumps(details, allow_nan=False)
    growth = details["growth"]
    assert growth["positions"][-1] == 256
    for fold in growth["folds"]:
        assert fold["appended"] + fold["merged"] == fold["stop"] - fold["start"]
    slots = sum(fold["appended"] for fold in growth["folds"])
    assert growth["slots"][-1] == slots == outcome.metrics["slots"]
    assert all(
        held <= max(allowed, 16) for held, allowed in zip(growth["slots"], growth["budget"], strict=True)
    )
    for layer in details["layers"]:
        for parts in zip(layer["sinks"], layer["state"], layer["window"], strict=True):
            assert sum(parts) == pytest.approx(1, abs=1e-5)
        assert layer["tokens_per_slot"]["mean"] == pytest.approx(
            growth["folds"][-1]["stop"] / slots, rel=1e-4
        )
        assert layer["largest_output_difference"] < 1e-4
        assert 1 <= layer["slots_in_use"][-1] < slots
        assert layer["age_opened"][-1] >= layer["age_written"][-1] >= 32
    shares = [outcome.metrics[f"{name}_share"] for name in ("sinks", "state", "window")]
    assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_the_table_has_the_layers_in_order(outcome: Outcome) -> None:
    assert [row[0] for row in outcome.rows] == ["1 kvm", "2 rwkv7", "4 kvm"]
    row, last = row_of(outcome, "4 kvm"), outcome.details["layers"][1]
    assert row["slots"] == str(outcome.details["growth"]["slots"][-1])
    assert row["fullest"] == str(int(last["tokens_per_slot"]["largest"]))
    shares = [float(row[name].rstrip("%")) for name in ("sinks", "state", "window")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert row_of(outcome, "2 rwkv7")["slots"].startswith("norm ")


def test_the_work_done_is_told_as_it_goes_on(text: Path) -> None:
    told: list[tuple[int, int]] = []
    options = Options(haystack=text.parent, limit=2, tokens=(64,))
    evaluate(opened_with(["kvm"]), options, lambda done, total: told.append((done, total)))
    assert told == [(16, 128), (32, 128), (48, 128), (64, 128), (80, 128), (96, 128), (112, 128), (128, 128)]


def test_the_most_read_slots_show_the_text_that_opened_them(outcome: Outcome) -> None:
    read = "\0" + TEXT
    slots = outcome.details["slots"]
    assert [one["share_of_state_reads"] for one in slots] == sorted(
        (one["share_of_state_reads"] for one in slots), reverse=True
    )
    for slot in slots:
        for token in (slot["opened_by"], *slot["most_similar"]):
            at = token["position"]
            assert token["text"] == read[at]
            assert token["before"] == read[max(at - 18, 0) : at]
            assert token["after"] == read[at + 1 : at + 19]
        similar = [one["similarity"] for one in slot["most_similar"]]
        assert similar == sorted(similar, reverse=True)
        assert len(similar) == min(slot["tokens"] - 1, 3)


def test_every_picture_is_drawn_in_full_size(outcome: Outcome, tmp_path: Path) -> None:
    drawn = draw([{"details": outcome.details}], tmp_path / "memory.png")
    names = ["memory.png", "memory-reads.png", "memory-slots.png", "memory-texts.png"]
    assert [picture.name for picture in drawn] == names
    assert {size_of(picture) for picture in drawn} == {(1600, 1000)}


def test_without_a_text_held_out_documents_are_read(tiny_run: TinyRun) -> None:
    opened, index = tiny_run.open(), load_index(tiny_run.data)
    found = evaluate(opened, Options(limit=2), nobody_watches)
    assert found.settings == {"data": str(tiny_run.data), "documents": 2, "tokens": 96} | {
        name: found.settings[name] for name in ("layer", "head")
    }
    held_out = next(split_documents(index, "validation", 96))
    text = "\0" + opened.tokenizer.decode(held_out[:95].tolist())
    for slot in found.details["slots"]:
        assert slot["opened_by"]["text"] == text[slot["opened_by"]["position"]]
    longest = max(len(one) for one in split_documents(index, "validation"))
    assert evaluate(opened, Options(limit=1, tokens=(5000,)), nobody_watches).settings["tokens"] == longest


def test_a_text_file_is_one_document_however_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {number}\n" for number in range(200)))  # pieces of it have 1,024 bytes
    opened = opened_with(["kvm"], kvm=KVMConfig(chunk=128))
    found = evaluate(opened, Options(haystack=path, tokens=(1200,)), nobody_watches)
    assert (found.settings["documents"], found.settings["tokens"]) == (1, 1200)
    assert found.details["slots"][0]["opened_by"]["after"] in path.read_text()


def test_a_document_whose_state_is_hardly_read_can_be_drawn(text: Path, tmp_path: Path) -> None:
    found = evaluate(opened_with(["kvm"]), Options(haystack=text, tokens=(33,), limit=1), nobody_watches)
    json.dumps(found.details, allow_nan=False)
    drawn = draw([{"details": found.details}], tmp_path / "memory.png")
    assert [picture.exists() for picture in drawn] == [True] * 4


def test_query_heads_that_share_a_memory_can_be_looked_at(text: Path) -> None:
    shared = KVMConfig(chunk=16, kv_heads=1, budget=_budget())
    options = Options(haystack=text, limit=1, tokens=(100,), argument="1.2")
    found = evaluate(opened_with(["kvm"], kvm=shared), options, nobody_watches)
    (layer,) = found.details["layers"]
    assert len(layer["by_head"]["state"]) == 2
    assert layer["largest_output_difference"] < 1e-4
    slots = found.details["growth"]["slots"][-1]
    assert layer["tokens_per_slot"]["mean"] == pytest.approx(
        80 / slots, rel=1e-4
    )  # the last two chunks are window


def test_a_head_can_be_chosen_and_a_wrong_one_is_refused(text: Path) -> None:
    opened = opened_with(HYBRID)
    found = evaluate(opened, Options(haystack=text, argument="4.2"), nobody_watches)
    assert (found.settings["layer"], found.settings["head"]) == (4, 2)
    for argument in ("2.1", "1.3", "0.1", "1.0", "1", "one.two"):
        with pytest.raises(ConfigError, match=f"memory:{argument}"):
            evaluate(opened, Options(haystack=text, argument=argument), nobody_watches)


def test_a_model_without_a_kvm_layer_or_a_document_within_the_window_is_refused(text: Path) -> None:
    with pytest.raises(ConfigError, match="no KVM layer"):
        evaluate(opened_with(["rwkv7"]), Options(haystack=text), nobody_watches)
    with pytest.raises(ConfigError, match="nothing leaves a window of 32"):
        evaluate(opened_with(["kvm"]), Options(haystack=text, tokens=(32,)), nobody_watches)


def test_the_map_of_many_slots_and_blocks_shows_means_over_cells() -> None:
    layer = LayerMemory(0, "0.kvm", KVMSettings(_budget(), chunk=4))
    for number in range(300):
        slots = 4 + number
        block = Block(4 * number, 4 * number + 4, 0, slots, ())
        mass = torch.full((1, slots), 0.5 / slots)
        layer.reads.append(BlockRead(block, mass, torch.tensor([0.5]), 0.0))
    found = heat(layer, 0)
    assert len(found["mass"]) == 160
    assert {len(row) for row in found["mass"]} == {128}
    assert (found["token_edges"][0], found["token_edges"][-1]) == (0, 1200)
    assert (found["slot_edges"][0], found["slot_edges"][-1]) == (0, 303)
    assert found["mass"][-1][0] is None
    assert found["mass"][0][-1] == pytest.approx(0.5 / 302, rel=0.01)


def test_quantiles_leave_out_what_is_no_number() -> None:
    found = quantiles(torch.tensor([3.0, torch.nan, 1.0, 2.0]))
    assert found == {"mean": 2.0, "q10": 1.0, "q50": 2.0, "q90": 3.0, "largest": 3.0}
    assert set(quantiles(torch.tensor([torch.nan])).values()) == {None}


def test_labels_keep_their_order_and_distance_within_the_picture() -> None:
    placed = _spread([0.1, 0.11, 0.5, 0.97, 0.98], 0.05, 0.1, 0.95)
    assert placed[:3] == pytest.approx([0.1, 0.15, 0.5])
    assert placed[3:] == pytest.approx([0.9, 0.95])


def _budget() -> Any:
    return tiny_config(["kvm"]).kvm.budget


def test_wide_letters_take_the_room_of_two() -> None:
    assert (_cells("abc"), _cells("日本"), _cells("🎉a"), _cells("e\u0301")) == (3, 4, 3, 1)
    assert _fitting("日本語", 5) == "日本"
    assert _fitting("abc", 0) == _fitting("abc", -3) == ""


def test_no_two_marks_of_an_axis_say_the_same() -> None:
    assert list(map(plain, (0, 0.5, 1, 1.5, 2, 2.5, 1000, 1000.5, 15_000, 0.002))) == [
        "0",
        "0.5",
        "1",
        "1.5",
        "2",
        "2.5",
        "1,000",
        "1000.5",
        "15,000",
        "0.002",
    ]
    figure = new_figure("a", "b")
    axes = figure.add_subplot()
    _other_state(axes, {"positions": [1, 2], "values": [2.0, 2.6]})
    label_counts(axes)
    figure.canvas.draw()
    for axis in (axes.yaxis, axes.xaxis):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        assert len(set(texts)) == len(texts) > 2
    axes.set_xlim(0.8, 4.2)
    figure.canvas.draw()
    steps = [label.get_text() for label in axes.xaxis.get_ticklabels()]
    assert {"1", "2", "3", "4"} <= set(steps)
    assert not any("." in text for text in steps)
