"""Rows that were measured: what they cover, and how they lie in files."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.kvm.kernels import measured, tuning
from models.kvm.kernels.launch import launch, observed_launches
from models.kvm.kernels.measured import MeasuredRow, measured_rows, read_rows, write_rows
from models.kvm.kernels.tuning import KERNELS, TARGETS, Kernel, Row, Shape, Tile, choose, kernel_of, on_trial

H200, HALF = TARGETS["sm_90"], Shape(128, 2)


def row(kernel: Kernel = "read", warps: int = 2, width: int = 128) -> MeasuredRow:
    tile = Tile(32, 32, warps)
    return MeasuredRow(Row(kernel, "sm_90", width, 2, tile, measured=True), 1.0, 2.0, "a GPU", "3.9.0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder of measured rows, for a while."""
    caches = (measured_rows, tuning._chosen)
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    for one in caches:
        one.cache_clear()
    yield tmp_path
    for one in caches:
        one.cache_clear()


def test_a_measured_row_goes_first_for_its_own_chip_width_and_bytes_alone(folder: Path) -> None:
    before = choose("read", H200, HALF)
    others = [(TARGETS["sm_100"], HALF), (H200, Shape(64, 2)), (H200, Shape(128, 4))]
    unchanged = [choose("read", *other) for other in others]
    write_rows(folder / "sm_90.json", [row()])
    assert choose("read", H200, HALF) == before, "rows are read once"
    measured_rows.cache_clear()
    tuning._chosen.cache_clear()
    assert choose("read", H200, HALF) == Tile(32, 32, 2) != before
    assert choose("read", H200, Shape(100, 2)) == Tile(32, 32, 2)
    assert [choose("read", *other) for other in others] == unchanged


def test_a_newer_row_replaces_that_of_its_place_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "sm_90.json"
    write_rows(path, [row("read"), row("route")])
    write_rows(path, [row("read", warps=16), row("read", width=64)])
    assert read_rows(path) == [row("read", width=64), row("read", warps=16), row("route")]


@pytest.mark.parametrize("text", ["[", '[{"row": {}}]', '[{"row": {"kernel": "reed"}}]', "[1]"])
def test_a_file_of_anything_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json.*--tune"):
        read_rows(tmp_path / "rows.json")


def test_a_row_that_was_not_measured_is_no_row_of_a_file(tmp_path: Path) -> None:
    unmeasured = Row("read", "sm_90", 128, 2, Tile(32, 32))
    write_rows(tmp_path / "rows.json", [MeasuredRow(unmeasured, 1.0, 2.0, "a GPU", "3.9.0")])
    with pytest.raises(ValueError, match="no measured row"):
        read_rows(tmp_path / "rows.json")


def test_a_tile_on_trial_is_taken_inside_and_not_after() -> None:
    before = choose("read", H200, HALF)
    with on_trial("read", Tile(16, 16, 1)):
        assert choose("read", H200, HALF) == Tile(16, 16, 1)
        assert choose("route", H200, HALF) != Tile(16, 16, 1)
    assert choose("read", H200, HALF) == before


def test_a_tile_is_on_trial_in_the_thread_too_in_which_autograd_runs_a_backward() -> None:
    with on_trial("fold", Tile(16, 16, 1)), ThreadPoolExecutor(1) as autograd:
        assert autograd.submit(choose, "fold", H200, HALF).result() == Tile(16, 16, 1)


class Jitted:
    """Stands in for a jitted function."""

    def __init__(self, name: str, started: list[str]) -> None:
        self.__name__, self.started = name, started

    def __getitem__(self, grid: tuple[int, ...]) -> "Jitted":
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self.started.append(self.__name__)


def test_an_observer_is_told_whose_launch_it_starts() -> None:
    started: list[str] = []
    told: list[Kernel] = []

    def observer(kernel: Kernel, start: object) -> None:
        told.append(kernel)
        start()  # type: ignore[operator]

    with observed_launches(observer):
        for name in ("walk_kernel", "read_kernel"):
            launch(Jitted(name, started), (1,), (), Tile(16, 16), H200)
        launch(Jitted("sort_kernel", started), (0,), (), Tile(16, 16), H200)
    launch(Jitted("delta_kernel", started), (1,), (), Tile(16, 16), H200)
    assert (told, started) == (["fold", "read"], ["walk_kernel", "read_kernel", "delta_kernel"])


def test_an_observer_is_told_of_launches_from_the_thread_in_which_autograd_runs_a_backward() -> None:
    told: list[Kernel] = []
    with observed_launches(lambda kernel, start: told.append(kernel)), ThreadPoolExecutor(1) as autograd:
        autograd.submit(launch, Jitted("delta_kernel", []), (1,), (), Tile(16, 16), H200).result()
    assert told == ["rows"]


def test_every_kernel_is_its_own() -> None:
    assert [kernel_of(f"{kernel}_kernel") for kernel in KERNELS if kernel not in ("rows", "fold")] == [
        kernel for kernel in KERNELS if kernel not in ("rows", "fold")
    ]
