"""Small corpora for the tests of the data system."""

import json
import random
from pathlib import Path

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.prepare import prepare

WORDS = ["state", "slot", "sink", "window", "merge", "chunk", "halo", "étage", "鍵"]


def text_of(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return f"document {seed}: " + " ".join(draw.choice(WORDS) for _ in range(words)) + "\n"


def write_folder(folder: Path, documents: int = 60, words: int = 40) -> Path:
    """A folder tree of text files of differing lengths."""
    for number in range(documents):
        path = folder / f"part{number % 3}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(number, words + number % 7), encoding="utf-8")
    return folder


def write_lines(path: Path, documents: int = 40) -> Path:
    lines = [json.dumps({"text": text_of(number, 30), "id": number}) for number in range(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small_dataset(folder: Path, **changes: object) -> DatasetIndex:
    """About 20 KB of text in half a dozen training shards."""
    settings: dict[str, object] = {
        "validation_fraction": 0.2,
        "shard_tokens": 3000,
        "unit_bytes": 8000,
        "workers": 1,
        "progress": False,
    }
    source = folder / "text"
    if not source.exists():
        write_folder(source)
    return prepare(source, folder / "data", **{**settings, **changes})  # type: ignore[arg-type]
