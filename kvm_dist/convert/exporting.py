"""A checkpoint, or a Hugging Face folder of ours, as a new Hugging Face folder or in the authors' layout."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvm_dist.convert.content import ModelContent, separator_tokens
from kvm_dist.convert.hugging_face import open_folder, write_folder
from kvm_dist.convert.new_folder import require_free
from kvm_dist.convert.published import write_published
from kvm_dist.convert.training_facts import evaluation_facts, training_facts
from kvm_dist.convert.weights import parameter_shapes, require_match
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.load import load_config
from kvm_dist.model_folder import is_hugging_face, require_model_folder
from kvm_dist.pretrained import open_checkpoint
from models.folder.card import CardFacts

Layout = Literal["huggingface", "authors"]


def export_model(
    path: Path, out: Path, layout: Layout, dtype: str | None, shard_bytes: int, silent: bool = False
) -> ModelContent:
    """Write the model of `path` (see `open_pretrained`) to the new folder `out`; what was written comes back.

    dtype: float32 or bfloat16; None: that of the forward. Of a run in bfloat16, float32 takes its masters.
    Raises ConfigError, DataError or StorageError; nothing is left at `out` then.
    """
    require_free(out)
    require_model_folder(path)
    name = out.resolve().name
    content = _of_folder(path, dtype, name) if is_hugging_face(path) else _of_checkpoint(path, dtype, name)
    if layout == "authors":
        return replace(content, notes=write_published(out, content, shard_bytes, silent))
    write_folder(out, content, shard_bytes, silent)
    return content


def _of_checkpoint(path: Path, dtype: str | None, name: str) -> ModelContent:
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint.path / "config.yaml").config
    shapes = parameter_shapes(config.model)
    require_match(checkpoint.path, {key: shapes.get(key, ()) for key in checkpoint.names}, shapes)
    wanted = dtype or config.parallel.precision
    kind = "master" if wanted == "float32" else "weight"

    def read(parameter: str) -> Tensor:
        return checkpoint.tensor(parameter, kind)

    tokenizer = build_tokenizer(config.data.tokenizer)
    facts = CardFacts(
        name,
        f"step {checkpoint.step:,} of the run {config.name}",
        training_facts(checkpoint, config),
        evaluation_facts(checkpoint),
    )
    return ModelContent(
        checkpoint.path,
        config.model,
        getattr(torch, wanted),
        read,
        tokenizer,
        separator_tokens(tokenizer),
        facts,
        training_context=config.data.sequence_length,
    )


def _of_folder(path: Path, dtype: str | None, name: str) -> ModelContent:
    folder = open_folder(path, dtype=dtype)
    tokenizer = build_tokenizer(folder.config.data.tokenizer) if folder.has_tokenizer else None
    facts = CardFacts(name, f"the folder {path.resolve().name}", folder.training, folder.evaluations)
    return ModelContent(
        path,
        folder.config.model,
        getattr(torch, folder.config.parallel.precision),
        folder.tensor,
        tokenizer,
        separator_tokens(tokenizer) if tokenizer else folder.special,
        facts,
        training_context=folder.training_context,
    )
