"""A model's `config.json` as transformers reads and writes it."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from models.config import ModelConfig
from models.folder.config import model_settings, require_agreement, standard_settings


class KVMDistConfig(PretrainedConfig):
    """`model`, the dump of a ModelConfig, says everything; the standard keys repeat a few of its fields.

    ValueError if they contradict it, or if a field of `model` is unknown or out of range.
    """

    model_type = "kvm_dist"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        **keys: Any,
    ) -> None:
        settings = model if isinstance(model, ModelConfig) else _read(model, keys)
        require_agreement(keys, settings)
        keys.pop("tie_word_embeddings", None)
        given = {name: keys.pop(name, value) for name, value in standard_settings(settings).items()}
        super().__init__(**keys)
        self.model = settings.model_dump(mode="json")
        for name, value in given.items():
            setattr(self, name, value)
        self.tie_word_embeddings = False
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    @property
    def model_config(self) -> ModelConfig:
        """`model` with its types, checked again: attributes of a config may be set at any time."""
        settings = model_settings(vars(self))
        require_agreement(vars(self), settings)
        return settings


def _read(model: Any, others: Mapping[str, Any]) -> ModelConfig:
    """Defaults where nothing at all is said of a model; transformers asks for those."""
    if model is None and not others.keys() & standard_settings(ModelConfig()).keys():
        return ModelConfig()
    return model_settings({"model": model})
