"""Tensors read one by one from safetensors files, and written one by one into new ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvm_dist.checkpoint.durable import write_durably
from kvm_dist.checkpoint.layout import FileLayout, TensorSpec, lay_out
from kvm_dist.convert.json_file import read_json_object, write_json
from kvm_dist.data.progress import Progress, show_progress
from kvm_dist.exit_codes import DataError, StorageError
from models.backbone import Backbone
from models.config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = 0o644  # these folders are passed on, unlike a run's
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float32}  # float32 holds it exactly


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the shards that its index names. Nothing is read ahead.

    Raises StorageError for files that are missing or damaged, or an index that does not fit them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        single, index = folder / SINGLE, folder / INDEX
        if single.is_file() and index.is_file():
            raise StorageError(f"{folder}: holds both {SINGLE} and {INDEX}; remove the one that is not meant")
        if index.is_file():
            self._open_shards(index)
        elif single.is_file():
            self._files = dict.fromkeys(*self._open(single))
        else:
            raise StorageError(f"{folder}: holds neither {SINGLE} nor {INDEX}; pickled weights are not read")
        if not self._files:
            raise DataError(f"{single}: holds no tensor, wanted the weights of a model; copy it again")

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """In which a model of ours takes the tensor exactly; DataError if there is none."""
        stored = self._files[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise DataError(f"{self.folder}: {name} is stored as {stored}, wanted {' or '.join(_DTYPES)}")
        return _DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{self.folder}: {name} cannot be read ({error})") from error
        return tensor

    def _open(self, path: Path) -> tuple[list[str], Any]:
        try:
            path.open("rb").close()  # says whether it is missing or forbidden, which safe_open mixes up
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}; copy the folder again") from error
        try:
            file = safe_open(path, framework="pt", device="cpu")
            return list(file.keys()), file
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{path}: damaged or cut off ({error}); copy the file again") from error

    def _open_shards(self, index: Path) -> None:
        places = read_json_object(index).get("weight_map")
        if not isinstance(places, Mapping) or not places:
            raise StorageError(f"{index}: holds no weight_map")
        shards = sorted({str(name) for name in places.values()})
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise StorageError(f"{index}: names {shard!r}, which is no safetensors file of this folder")
            if not (self.folder / shard).is_file():
                raise StorageError(f"{index}: names {shard}, which is missing; copy the folder again")
        for shard in shards:
            names, file = self._open(self.folder / shard)
            for name in names:
                if places.get(name) != shard:
                    raise StorageError(
                        f"{self.folder / shard}: holds {name}, which {INDEX} places in {places.get(name)}"
                    )
                self._files[name] = file
        if lost := sorted(places.keys() - self._files.keys()):
            raise StorageError(f"{index}: places {lost[0]} in {places[lost[0]]}, which does not hold it")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a model, without its memory."""
    with torch.device("meta"):
        return {name: tuple(z.shape) for name, z in Backbone(model).state_dict().items()}


def one_dtype(weights: SafetensorsFolder) -> torch.dtype:
    """The dtype of all tensors; DataError if there are two."""
    first = weights.names[0]
    for name in weights.names:
        if weights.dtype(name) != weights.dtype(first):
            raise DataError(
                f"{weights.folder}: {first} is {weights.dtype(first)}, {name} {weights.dtype(name)}; "
                "`import` and `export` write all in one if told which: --dtype float32 or --dtype bfloat16"
            )
    return weights.dtype(first)


def require_match(
    origin: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """DataError that names tensors that are missing, extra, or of another shape."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} has no place in this model" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(found[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise DataError(f"{origin}: {'; '.join(problems[:8])}{more}")


def require_finite(origin: Path, name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise DataError(f"{origin}: {name} holds values that are not finite")
    return tensor


def weight_layouts(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, part_bytes: int
) -> list[FileLayout]:
    """The files that tensors of one dtype are written into."""
    return lay_out("model", [TensorSpec(name, dtype, shape) for name, shape in shapes.items()], part_bytes)


def write_weights(
    folder: Path,
    layouts: Sequence[FileLayout],
    read: Callable[[str], Tensor],
    label: str,
    silent: bool = False,
) -> None:
    """Write every tensor as `read` gives it, one at a time, and the index if there are several files."""
    with show_progress(label, sum(layout.size for layout in layouts), silent) as progress:
        for layout in layouts:
            write_durably(folder / layout.name, _pieces(layout, read, progress), len(layout.offsets))
            (folder / layout.name).chmod(READABLE)
    if len(layouts) > 1:
        total = sum(layout.size - len(layout.header) for layout in layouts)
        places = {name: layout.name for layout in layouts for name in layout.offsets}
        write_json(
            folder / INDEX,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
        )


def _pieces(
    layout: FileLayout, read: Callable[[str], Tensor], progress: Progress
) -> Iterator[bytes | memoryview]:
    yield layout.header
    progress.advance(len(layout.header))
    end = len(layout.header)
    for name, offset in layout.offsets.items():
        assert offset == end, "tensors follow each other in the order of the layout"
        raw = read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield raw
        end += len(raw)
        progress.advance(len(raw))
    assert end == layout.size, f"{layout.name}: wrote {end} bytes, planned {layout.size}"
