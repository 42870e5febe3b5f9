"""From YAML files and `key=value` overrides to one RunConfig, with the origin of every value. No torch.

Precedence: defaults < `extends:` files < the file < the command line. Mappings are merged key by key;
a list, a scalar, or a mapping that names another `kind` replaces what was there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvm_dist import strict_yaml
from kvm_dist.config import RunConfig
from kvm_dist.config_errors import described, place
from kvm_dist.exit_codes import ConfigError
from kvm_dist.strict_yaml import Located

DEFAULT = "default"
MAXIMUM_EXTENDS = 8


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and, for every leaf (`train.steps`), where its value was written."""

    config: RunConfig
    provenance: Mapping[str, str]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, merge and check. Raises ConfigError with one line for every problem found."""
    problems: list[str] = []
    tree = _defaults()
    file_layers = _file_layers(Path(path), problems, chain=())
    for layer in [*file_layers, _overrides(overrides, problems)]:
        tree = merge(tree, layer) if layer is not None else tree
    config = _validated(tree, problems) if None not in file_layers else None
    if problems or config is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return LoadedConfig(config, _provenance(tree, config))


def load_values(values: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """`values` over the defaults, as a file's that is called `source`; raises ConfigError likewise."""
    problems: list[str] = []
    tree = merge(_defaults(), _located(values, source))
    if (layer := _overrides(overrides, problems)) is not None:
        tree = merge(tree, layer)
    config = _validated(tree, problems)
    if problems or config is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return LoadedConfig(config, _provenance(tree, config))


def dump_config(config: RunConfig) -> str:
    """YAML that loads back to an equal config."""
    return strict_yaml.dump(config.model_dump(mode="json"))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 5}}` -> `{"train.steps": 5}`; an empty section is a leaf."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def merge(base: Located, top: Located) -> Located:
    """`top` over `base`."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    old_kind, new_kind = base.value.get("kind"), top.value.get("kind")
    if old_kind is not None and new_kind is not None and old_kind.value != new_kind.value:
        return top
    merged = dict(base.value)
    for name, part in top.value.items():
        merged[name] = merge(merged[name], part) if name in merged else part
    return Located(merged, top.source)


def _defaults() -> Located:
    return _located(RunConfig().model_dump(mode="json"), DEFAULT)


def _located(value: Any, source: str) -> Located:
    if isinstance(value, Mapping):
        return Located({name: _located(part, source) for name, part in value.items()}, source)
    if isinstance(value, list):
        return Located([_located(part, source) for part in value], source)
    return Located(value, source)


def _file_layers(
    path: Path, problems: list[str], chain: tuple[Path, ...], asked_by: str = ""
) -> list[Located | None]:
    """The files that `path` extends, lowest first, then the file itself; None for one that cannot be read."""
    if path.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, path))
        problems.append(f"{asked_by}: extends: a circle of files: {names}; remove one `extends`")
        return [None]
    if len(chain) > MAXIMUM_EXTENDS:
        problems.append(f"{asked_by}: extends: more than {MAXIMUM_EXTENDS} files deep; flatten them")
        return [None]
    layer = _read_file(path, problems, asked_by)
    if layer is None:
        return [None]
    parts = dict(layer.value)
    layers: list[Located | None] = []
    if (extends := parts.pop("extends", None)) is not None:
        others = [extends.value] if isinstance(extends.value, str) else extends.plain()
        if not isinstance(others, list) or not all(isinstance(name, str) for name in others):
            problems.append(f"{extends.source}: extends: wanted a file name or several, got {_shown(others)}")
            others = []
        for name in others:
            layers += _file_layers(path.parent / name, problems, (*chain, path.resolve()), extends.source)
    return [*layers, Located(parts, layer.source)]


def _read_file(path: Path, problems: list[str], asked_by: str) -> Located | None:
    prefix = f"{asked_by}: extends: " if asked_by else ""
    try:
        if path.stat().st_size > strict_yaml.MAXIMUM_BYTES:
            problems.append(f"{prefix}{path}: larger than {strict_yaml.MAXIMUM_BYTES} bytes")
            return None
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        problems.append(
            f"{prefix}{path}: cannot be read: {error.strerror or error}; give the path of a YAML file"
        )
        return None
    except UnicodeDecodeError as error:
        problems.append(f"{prefix}{path}: not UTF-8 text (byte {error.start})")
        return None
    layer, found = strict_yaml.read(text, lambda line: f"{path}:{line}")
    problems += found
    if layer is None:
        return None
    if layer.value is None:
        return Located({}, layer.source)
    if not isinstance(layer.value, dict):
        problems.append(f"{layer.source}: wanted `key: value` lines, got {_shown(layer.plain())}")
        return None
    return layer


def _overrides(texts: Sequence[str], problems: list[str]) -> Located | None:
    """All of them as one layer, so that a `kind` among them may come before or after its keys."""
    layers = [layer for text in texts if (layer := _override_layer(text, problems)) is not None]
    return reduce(merge, layers) if layers else None


def _override_layer(text: str, problems: list[str]) -> Located | None:
    """`a.b=1` -> `{a: {b: 1}}`."""
    source = f"command line: {_without_password(text)}"
    key, equals, written = text.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        problems.append(f"{source}: wanted key=value, for example train.steps=100")
        return None
    if names[0] == "extends":
        problems.append(f"{source}: extends works in files only; put it into a YAML file")
        return None
    layer, found = strict_yaml.read(written, lambda line: source)
    problems += found
    if layer is None or found:
        return None
    for name in reversed(names):
        layer = Located({name: layer}, source)
    return layer


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//***@", text)


def _validated(tree: Located, problems: list[str]) -> RunConfig | None:
    """The config, or None with the problems added.

    Rules across keys run in pydantic only once every key is right by itself; to show them all at once, wrong
    keys are set aside and the rest is checked again. What then speaks of a key set aside is left out.
    """
    set_aside: set[str] = set()
    for _ in range(3):
        try:
            text = json.dumps(tree.plain(), allow_nan=False)
            config = RunConfig.model_validate_json(text, strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            for e in errors:
                problems += [line for line in described(e, tree) if not _speaks_of(line, set_aside)]
            wrong = [path for e in errors if (path := place(tree, e["loc"]))]
            if not wrong:
                return None
            set_aside |= {".".join(path) for path in wrong}
            for path in wrong:
                tree = _with_default(tree, path)
        else:
            return None if set_aside else config
    return None


def _speaks_of(problem: str, keys: set[str]) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", problem) for key in keys)


def _with_default(tree: Located, path: tuple[str, ...]) -> Located:
    """The tree with the value at `path` back at its default, or gone if it has none."""

    def replaced(part: Located, default: Any, rest: tuple[str, ...]) -> Located | None:
        if not rest:
            return default
        if not isinstance(part.value, dict) or rest[0] not in part.value:
            return part
        below = (
            default.value.get(rest[0]) if default is not None and isinstance(default.value, dict) else None
        )
        changed = replaced(part.value[rest[0]], below, rest[1:])
        kept = {name: value for name, value in part.value.items() if name != rest[0]}
        return Located(kept | ({rest[0]: changed} if changed is not None else {}), part.source)

    return replaced(tree, _defaults(), path) or _defaults()


def _provenance(tree: Located, config: RunConfig) -> dict[str, str]:
    sources: dict[str, str] = {}

    def walk(part: Located, prefix: str) -> None:
        for name, value in part.value.items():
            if isinstance(value.value, dict) and value.value:
                walk(value, f"{prefix}{name}.")
            else:
                sources[prefix + name] = value.source

    walk(tree, "")
    return {key: sources.get(key, DEFAULT) for key in leaves(config.model_dump(mode="json"))}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
