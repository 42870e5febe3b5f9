"""Validation errors in a person's words: where, which key, what was got, what is wanted. Imports no torch."""

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from kvm_dist.config import RunConfig
from kvm_dist.strict_yaml import Located

_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes if it looks like a number)",
    "path_type": "a path",
    "list_type": "a list such as [a, b]",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "greater_than": "a value > {gt}",
    "greater_than_equal": "a value >= {ge}",
    "less_than": "a value < {lt}",
    "less_than_equal": "a value <= {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "union_tag_invalid": "kind: {expected_tags}",
    "union_tag_not_found": "a section with a `kind`",
}


def place(tree: Located, location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys that pydantic's location means: without union tags, ending at a leaf at the latest."""
    path: list[str] = []
    part: Located | None = tree
    for name in location:
        if part is None or not isinstance(part.value, dict):
            break
        kind = part.value.get("kind")
        if name not in part.value and kind is not None and kind.value == name:
            continue
        path.append(str(name))
        part = part.value.get(str(name))
    return tuple(path)


def described(error: ErrorDetails, tree: Located) -> list[str]:
    """Lines `file:line: key: what is wrong and how to mend it`; more than one if a rule found more."""
    path = place(tree, error["loc"])
    if error["type"] in ("value_error", "assertion_error"):
        message = str(error.get("ctx", {}).get("error", error["msg"]))
        return [_rule(line, tree, path) for line in message.splitlines()]
    part = _at(tree, path)
    key = ".".join(path)
    got = _shown(part.plain() if part is not None else error["input"])
    if error["type"] == "extra_forbidden":
        problem = f"unknown key; {_nearest(tree, path)}"
    elif error["type"] == "missing":
        problem = "this key is needed"
    elif (wanted := _WANTED.get(error["type"])) is not None:
        problem = f"wanted {wanted.format(**error.get('ctx', {}))}, got {got}"
    else:
        problem = f"got {got}; {error['msg'][:1].lower()}{error['msg'][1:]}"
    return [f"{_source(tree, path)}: {key}: {problem}"]


def _rule(message: str, tree: Located, path: tuple[str, ...]) -> str:
    """A rule's own words, at the places of the keys it names that somebody wrote."""
    named = [key for key in _known_keys() if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", message)]
    sources = [_source(tree, tuple(key.split("."))) for key in named]
    written = list(dict.fromkeys(source for source in sources if source != "default"))
    return f"{', '.join(written) or _source(tree, path)}: {message}"


def _at(tree: Located, path: tuple[str, ...]) -> Located | None:
    part: Located | None = tree
    for name in path:
        part = part.value.get(name) if part is not None and isinstance(part.value, dict) else None
    return part


def _source(tree: Located, path: tuple[str, ...]) -> str:
    """Where the value at `path` was written; for a missing one, its section."""
    for end in range(len(path), -1, -1):
        if (part := _at(tree, path[:end])) is not None:
            return part.source
    return tree.source


def _nearest(tree: Located, path: tuple[str, ...]) -> str:
    """`did you mean ...?` in the same section, else the same name elsewhere, else all names here."""
    *above, name = path
    siblings = [field for section in _sections(tree, above) for field in section.model_fields]
    prefix = "".join(part + "." for part in above)
    with_more = sorted((field for field in siblings if name.startswith(field)), key=len, reverse=True)
    if close := with_more or difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = [key for key in _known_keys() if key.rsplit(".", 1)[-1] == name and key != ".".join(path)]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"known keys here: {', '.join(dict.fromkeys(siblings))}"


def _sections(tree: Located, path: list[str]) -> list[type[BaseModel]]:
    """The config types that may stand at `path`, narrowed by `kind` where it is given."""
    types: list[type[BaseModel]] = [RunConfig]
    part: Located | None = tree
    for name in path:
        types = [t for s in types if name in s.model_fields for t in _types(s.model_fields[name].annotation)]
        part = part.value.get(name) if part is not None and isinstance(part.value, dict) else None
        if part is not None and isinstance(part.value, dict) and "kind" in part.value:
            kind = part.value["kind"].value
            types = [
                t for t in types if "kind" not in t.model_fields or t.model_fields["kind"].default == kind
            ]
    return types


def _types(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _types(argument)


def _known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key that a config may hold."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        below = [key for t in _types(field.annotation) for key in _known_keys(t, f"{prefix}{name}.")]
        keys += below or [prefix + name]
    return list(dict.fromkeys(keys))


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
