"""`config show` and `config schema`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvm_dist.config import RunConfig
from kvm_dist.load import LoadedConfig
from kvm_dist.strict_yaml import dump_inline


def print_config(loaded: LoadedConfig) -> None:
    """YAML that loads back to the same config, with the origin of every value as a comment."""
    lines = list(_lines(loaded.config.model_dump(mode="json"), loaded.provenance))
    width = min(60, max(len(text) for text, _ in lines))
    for text, source in lines:
        print(f"{text:<{width}}  # {source}" if source else text)


def print_schema() -> None:
    """What an editor needs to complete and check configuration files; `extends` included."""
    schema = RunConfig.model_json_schema()
    schema["properties"]["extends"] = {
        "description": "files below this one, relative to it",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    print(json.dumps(schema, indent=2))


def _lines(
    section: Mapping[str, Any], provenance: Mapping[str, str], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(above)
    for name, value in section.items():
        path = (*above, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(value, provenance, path)
        else:
            yield f"{indent}{name}: {dump_inline(value)}", provenance[".".join(path)]
