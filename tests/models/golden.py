"""The tiny models of the paper's families, computed by the authors' code in float32."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from models.backbone import Backbone
from models.published.names import from_authors
from models.published.settings import model_config

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass
class GoldenModel:
    model: Backbone
    input_ids: Tensor
    labels: Tensor
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def golden_model(name: str, **changes: object) -> GoldenModel:
    """The model of a golden file with its expected results; `changes` override its config."""
    folder = GOLDEN / "checkpoints" / name
    config = model_config(json.loads((folder / "config.json").read_text()))
    model = Backbone(config.model_copy(update=changes))
    model.load_state_dict(from_authors(load_file(folder / "model.safetensors"), config))
    vectors = load_file(GOLDEN / f"model_{name}.safetensors")
    gradients = {key.removeprefix("grad."): z for key, z in vectors.items() if key.startswith("grad.")}
    return GoldenModel(
        model,
        vectors["input_ids"],
        vectors["labels"],
        vectors["logits"],
        vectors["loss"],
        from_authors(gradients, config),
    )
