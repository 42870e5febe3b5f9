"""What a Hugging Face folder of ours says of itself, in `config.json` and beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from models.config import ModelConfig

MODEL_TYPE = "kvm_dist"
ARCHITECTURE = "KVMDistForCausalLM"
PREFIX = "backbone."  # of every parameter's name
OWN_TOKENIZER = "."  # the tokenizer whose files lie in the folder itself
_STANDARD_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}  # the name other programs look for -> the field of a ModelConfig


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that generation needs; None where there is no tokenizer."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "SpecialTokens":
        """Those that a `config.json` names."""
        named = (settings.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
        return cls(*(token if isinstance(token, int) else None for token in named))

    def ids(self) -> dict[str, int | None]:
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def folder_config(
    model: ModelConfig,
    dtype: str,
    tokenizer: str | None,
    special: SpecialTokens,
    training_context: int | None,
) -> dict[str, Any]:
    """`config.json`. tokenizer: what `build_tokenizer` is given, "." for the folder's own files.

    training_context: tokens of a sequence in training; no bound on those that can be read.
    """
    known = {} if training_context is None else {"training_context": training_context}
    return known | {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "dtype": dtype,
        **standard_settings(model),
        **special.ids(),
        "tie_word_embeddings": False,
        "tokenizer": tokenizer,
        "model": model.model_dump(mode="json"),
    }


def standard_settings(model: ModelConfig) -> dict[str, int]:
    """What other programs look for in a `config.json`."""
    return {name: getattr(model, field) for name, field in _STANDARD_KEYS.items()}


def model_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` describes under `model`. ValueError names every key that is wrong."""
    values = settings.get("model")
    if not isinstance(values, Mapping):
        raise ValueError(
            f"config.json: model: wanted the settings of the layers by their names, got {values!r}; export "
            "the model again"
        )
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        found = "; ".join(_in_words(problem) for problem in error.errors())
        raise ValueError(f"config.json: {found}; mend it, or export the model again") from error


def _in_words(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    name = ".".join(map(str, ("model", *problem["loc"])))
    return f"{name}={problem['input']!r}: {problem['msg']}"


def require_agreement(settings: Mapping[str, Any], model: ModelConfig) -> None:
    """ValueError where a `config.json` says of its model something else than under `model`."""
    if settings.get("tie_word_embeddings"):
        raise ValueError(
            "config.json: tie_word_embeddings=true is not supported: the head is a matrix of its own; set it "
            "to false"
        )
    for name, value in standard_settings(model).items():
        if settings.get(name, value) != value:
            raise ValueError(
                f"config.json: {name}={settings[name]} contradicts model.{_STANDARD_KEYS[name]}={value}; "
                "change the one under `model` and leave the other out"
            )


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """`generation_config.json`: greedy until the end-of-text token, unless asked otherwise."""
    return special.ids() | {"use_cache": True}


def is_ours(settings: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a folder that this package writes."""
    return settings.get("model_type") == MODEL_TYPE
