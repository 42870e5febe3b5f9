"""From the clocks of processes to programs, speed-up, error and counts; and the processes themselves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvm_dist.bench.scaling import rank as tasks
from kvm_dist.bench.scaling.calibrate import (
    MeasuredLink,
    measured_programs,
    operation_between,
    operation_seconds,
)
from kvm_dist.bench.scaling.extrapolate import BY_HEADS, IN_TWO, WAVE
from kvm_dist.bench.scaling.measured import Measured
from kvm_dist.bench.scaling.program import Begin, End, Receive, Send, Work
from kvm_dist.bench.scaling.results import Results
from kvm_dist.bench.scaling.setting import QUICK, Setting, Task
from kvm_dist.exit_codes import ConfigError
from kvm_dist.plots.scaling import measured_step
from launch import scaling_bench
from launch.scaling_tables import tables
from parallel.world import World
from tests.support.ranks import Ranks

TINY = replace(
    QUICK, tokens=128, num_layers=2, hidden_size=32, heads=2, chunk=16, slots_per_root=4.0, steps=2
)
LINK = [
    {"bytes": 100, "one_way_seconds": 1.5, "sender_seconds": 0.5},
    {"bytes": 200, "one_way_seconds": 99.0, "sender_seconds": 99.0},
    {"bytes": 300, "one_way_seconds": 3.0, "sender_seconds": 0.75},
]


def event(start: float, stop: float, operation: str, name: str, phase: str = "forward") -> dict[str, Any]:
    source, to = (0, 1) if (operation == "send") == (phase == "forward") else (1, 0)
    layer = int(name.split(".")[0])
    return {
        "start": start, "stop": stop, "operation": operation, "source": source, "to": to,
        "name": name, "phase": phase, "layer": layer, "bytes": 8,
    }  # fmt: skip


def first_rank(stretch: float) -> dict[str, Any]:
    """Forward from 0 to 10, backward from 100 to 120; calls take time that is not the rank's computing."""
    events = [
        event(2 * stretch, 2 * stretch + 1, "send", "0.kvm.keys"),
        event(2 * stretch + 3, 2 * stretch + 4, "send", "0.kvm.values"),
        event(105, 106, "receive", "0.kvm.slots.gradient", "backward"),
    ]
    return {"forward": [0.0, 10.0], "backward": [100.0, 120.0], "events": events}


def test_what_a_rank_computes_lies_between_its_messages_and_pauses_are_left_out() -> None:
    rounds = [{"ranks": [first_rank(stretch)], "tail_seconds": stretch} for stretch in (1.0, 1.5, 9.0)]
    (program,) = measured_programs([{"rounds": rounds[:2]}, {"rounds": rounds[2:]}])
    assert [type(step) for step in program] == [Work, Send, Work, Send, Work, Receive, Work, Begin, End]
    seconds = [step.seconds for step in program if isinstance(step, Work | Begin)]
    # until the keys, until the values, rest of the forward and start of the backward, after the gradient
    assert seconds == [3.0, 2.0, 10.0 - 7.0 + 5.0, 14.0, 1.5]
    assert operation_seconds(program) == {
        "backward: projections, feed-forward": 14.0,
        "backward: last feed-forward, loss": 8.0,
        "forward: route": 3.0,
        "forward: values": 2.0,
    }


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (("receive", "1.kvm.keys"), ("send", "1.kvm.keys"), "route"),
        (("receive", "1.kvm.values"), ("send", "1.kvm.values"), "values"),
        (("send", "1.kvm.values"), ("send", "1.feed_forward.shift"), "attend"),
        (("receive", "1.kvm.values"), ("receive", "1.feed_forward.shift"), "route, attend"),
        (("receive", "1.rwkv7.state"), ("send", "1.rwkv7.state"), "recurrence: carry"),
        (("send", "1.rwkv7.state"), ("send", "1.feed_forward.shift"), "recurrence: read"),
        (("receive", "1.feed_forward.shift"), ("send", "2.kvm.shift"), "projections, feed-forward"),
    ],
)
def test_operations_are_named_by_the_messages_around_them(
    before: tuple[str, str], after: tuple[str, str], name: str
) -> None:
    assert operation_between(event(0, 0, *before), event(0, 0, *after)) == (name, "forward")


def test_a_link_is_a_line_through_the_smallest_and_the_largest_message() -> None:
    link = MeasuredLink.fit(LINK)
    for row in (LINK[0], LINK[2]):
        size = int(row["bytes"])
        sending = link.sender_seconds(0, 1, size)
        assert sending == pytest.approx(row["sender_seconds"])
        total = sending + link.wire_seconds(0, 1, size) + link.latency_seconds(0, 1)
        assert total == pytest.approx(row["one_way_seconds"])


def measured_from(tmp_path: Path, whole: float, together: float) -> Measured:
    """As the tasks leave them: one rank, alone 3 + 2 + 8 + 14 + 1 seconds long."""
    results: dict[str, list[dict[str, Any]]] = {
        "whole": [{"seconds": [whole, whole + 1, whole + 50]}],
        "alone": [
            {
                "rounds": [{"ranks": [{**first_rank(1.5), "events": []}], "tail_seconds": 1.0}],
                "spans": [[0, 128]],
                "parameters": 10,
            }
        ],
        "together": [
            {
                "steps": [{"begun": 0.0, "seconds": together, "events": []}],
                "link": LINK,
            }
        ],
        "heads": [{"seconds": [30.0, 20.0, 24.0]}, {"seconds": [20.0, 25.0, 24.0]}],
        "pairs": [{"seconds": [40.0, 60.0, 34.0]}, {"seconds": [39.0, 20.0, 35.0]}],
    }
    for task, found in results.items():
        (tmp_path / task).mkdir()
        for number, one in enumerate(found):
            (tmp_path / task / f"rank-{number}.json").write_text(json.dumps(one))
    return Measured.read(TINY, {task: tmp_path / task for task in results})


def test_speedup_and_error_compare_medians(tmp_path: Path) -> None:
    measured = measured_from(tmp_path, whole=49.0, together=25.0)
    assert measured.speedup == 2.0
    assert measured.heads_steps == [30.0, 25.0, 24.0]
    assert measured.heads_speedup == 2.0
    assert measured.pairs_steps == [40.0, 60.0, 35.0]
    assert measured.pairs_seconds == 20.0, "a step is of two sequences"
    assert measured.pairs_speedup == 2.5
    assert measured.timeline.seconds == 10.0 + 20.0 + 1.0
    assert measured.error == pytest.approx(31 / 25 - 1)
    met = {goal.name: goal.met for goal in measured.goals()}
    assert list(met.values()) == [True, False, True]
    (profile,) = measured.profiles
    assert (profile.computing, profile.waiting, profile.update) == (24.0, 0.0, 1.0)
    assert measured.as_json()["goals"][1]["met"] is False


def test_the_tables_say_what_was_measured_and_which_goals_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measured_from(tmp_path, whole=49.0, together=25.0)
    console = Console(width=160)
    for table in tables(Results(measured, [], [], {"load_average_start": 0.0})):
        console.print(table)
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "one process, measured",
        "50.000",
        "speed-up measured 2.00",
        "replay off by +24.0%; by heads 2.00; two ways at once 2.50",
        "two sequences from both ends, measured, of each",
        "20.000",
        "not met",
    ):
        assert words in printed


def test_the_command_writes_numbers_and_pictures_and_refuses_what_cannot_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found" / "scaling.json"
    scaling_bench.bench_scaling(quick=True, model_only=True, tokens=None, json_path=path)
    printed = capsys.readouterr()
    for words in (
        "modelled on H200",
        "modelled on MI325X",
        "halved / doubled",
        "modelled: replayed",
        str(path),
    ):
        assert words in printed.out
    assert "100% done" in printed.err
    written = json.loads(path.read_text())
    assert written["measured"] is None
    assert {row["tokens"] for row in written["modelled"]} == {32_768}
    assert {goal["wanted"] for goal in written["goals"]} == {0.95}
    assert len(written["goals"]) == 4  # of each device the best settings of a chain and of two levels
    for goal in written["goals"]:
        names = (BY_HEADS,) if "2-D" in goal["name"] else (WAVE, IN_TWO)
        alike = (
            row for row in written["modelled"] if row["method"] in names and row["device"] in goal["name"]
        )
        assert goal["got"] == pytest.approx(max(row["efficiency"] for row in alike))
    for picture in (path.with_suffix(".png"), path.with_name("scaling-wavefront.png")):
        assert picture.stat().st_size > 20_000
    with pytest.raises(ConfigError, match=r"bench scaling --tokens 64: data.sequence_length=64 is too short"):
        scaling_bench.bench_scaling(quick=True, model_only=False, tokens=64, json_path=None)


def told(task: Task, setting: Setting, world: World) -> dict[str, Any]:
    """What a task finds; it reports as many pieces of work as the share that is done is reckoned by."""
    pieces: list[None] = []
    found = tasks.TASKS[task](setting, world, lambda: pieces.append(None))
    assert len(pieces) == setting.steps + 1
    return found


def run_alone(world: World, setting: Setting) -> dict[str, Any]:
    return told("alone", setting, world)


def run_together(world: World, setting: Setting) -> dict[str, Any]:
    return told("together", setting, world)


def run_heads(world: World, setting: Setting) -> dict[str, Any]:
    return told("heads", setting, world)


def run_pairs(world: World, setting: Setting) -> dict[str, Any]:
    return told("pairs", setting, world)


def test_a_step_in_pairs_is_of_two_sequences_from_both_ends() -> None:
    config = TINY.task_config("pairs")
    assert config.parallel.two_way_chain
    assert config.train.accumulation == config.train.batch_sequences == 2
    assert not TINY.task_config("together").parallel.two_way_chain


def test_ranks_alone_and_together_send_the_same_messages_and_fit_the_closed_forms(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        alone = ranks.run(run_alone, TINY)
        together = ranks.run(run_together, TINY)
        heads = ranks.run(run_heads, TINY)
        pairs = ranks.run(run_pairs, TINY)
    measured = Measured(TINY, {"seconds": [1.0]}, alone, together, heads, pairs)
    for steps in (measured.heads_steps, measured.pairs_steps):
        assert len(steps) == TINY.steps
        assert min(steps) > 0
    assert measured.spans[0][0] == 0
    assert measured.spans[-1][1] == TINY.tokens
    assert all(one.agrees for one in measured.counts)
    assert {(one.rank, one.phase) for one in measured.counts} == {(0, "forward"), (1, "backward")}
    for number, process in enumerate(together):
        assert len(process["steps"]) == TINY.steps
        for step in process["steps"]:
            names = [(one["operation"], one["name"], one["bytes"]) for one in step["events"]]
            turns = alone[0]["rounds"][0]["ranks"][number]["events"]
            assert names == [(one["operation"], one["name"], one["bytes"]) for one in turns]
    assert measured.timeline.seconds > 0
    real = measured.real_timeline
    for worked in real.of_rank:  # a rank's computing and its messages take turns
        assert [span.start for _, span in worked[1:]] >= [span.end for _, span in worked[:-1]]
    assert real.seconds >= measured.together_seconds
    assert measured_step(measured, tmp_path / "step.png").stat().st_size > 10_000


def test_a_setting_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks=1"):
        Setting(ranks=1)
    with pytest.raises(ValueError, match="steps=0"):
        Setting(steps=0)
