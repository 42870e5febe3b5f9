"""A run with a checkpoint of a small byte model that was never trained, and prepared data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvm_dist.config import DataConfig, RunConfig, TrackingConfig
from kvm_dist.data.prepare import prepare
from kvm_dist.load import dump_config
from kvm_dist.pretrained import Pretrained, open_pretrained
from models.backbone import Backbone
from tests.kvm_dist.checkpoint_samples import save_tensors
from tests.models.tiny import tiny_model

LAYERS = ["kvm", "rwkv7", "full_attention"]
STEP = 50


@dataclass(frozen=True)
class TinyRun:
    """`directory`: of the run; `data`: prepared documents, some of them held back."""

    directory: Path
    data: Path
    model: Backbone

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoints" / f"step-{STEP:08d}"

    def open(self, *overrides: str) -> Pretrained:
        return open_pretrained(self.directory, overrides)


def write_documents(folder: Path, lengths: list[int]) -> None:
    """One text file of each number of bytes; no two alike."""
    folder.mkdir()
    for number, length in enumerate(lengths):
        words = (f"line {n * (number + 3) % 97} of text {number}. " for n in range(length // 8))
        (folder / f"{number:03d}.txt").write_text("".join(words)[:length])


def make_tiny_run(root: Path, **changes: Any) -> TinyRun:
    """changes: of the model. Data: 16 documents of 300 to 1,800 bytes, about half of them held back."""
    texts = root / "texts"
    write_documents(texts, [300 + 100 * number for number in range(16)])
    data = root / "data"
    prepare(str(texts), data, "bytes", validation_fraction=0.5, progress=False)
    model = tiny_model(LAYERS, vocab_size=256, **changes)
    config = RunConfig(
        name="tiny",
        run_root=root / "runs",
        model=model.config,
        data=DataConfig(path=data, sequence_length=96),
        tracking=TrackingConfig(enabled=False),
        device="cpu",
    )
    directory = root / "runs" / "tiny"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_config(config))
    (directory / "checkpoints").mkdir()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_tensors(directory / "checkpoints", STEP, tensors, config_text=dump_config(config))
    return TinyRun(directory, data, model)
