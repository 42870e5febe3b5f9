"""YAML without surprises: every value keeps where it was written, and what YAML guesses wrongly is refused.

Against plain YAML 1.1: `3e-4` is a number; `12:30:00`, `yes` and dates are text; `010` is refused (8 or 10?);
equal keys in one mapping are refused; tags, merge keys and further documents too. Size, depth and aliases are
bounded. `1_000_000` is a whole number. Imports no torch.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

MAXIMUM_BYTES = 1_000_000
MAXIMUM_DEPTH = 32
MAXIMUM_VALUES = 20_000  # after aliases are followed

_REFUSED = object()  # stands for a value whose problem is already reported
_TAG = "tag:yaml.org,2002:"
_LEADING_ZERO = "leading zero"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_ZERO_FIRST = re.compile(r"^[-+]?0[0-9_]+$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_RESOLVERS = (
    (_TAG + "null", _NULL, ["~", "n", "N", ""]),
    (_TAG + "bool", _BOOL, list("tTfF")),
    (_LEADING_ZERO, _ZERO_FIRST, list("-+0")),
    (_TAG + "int", _INT, list("-+0123456789")),
    (_TAG + "float", _FLOAT, list("-+.0123456789")),
)


@dataclass(frozen=True)
class Located:
    """A value and where it was written: a scalar, a list of Located, or a dict of names to Located."""

    value: Any
    source: str

    def plain(self) -> Any:
        """The value without locations."""
        if isinstance(self.value, dict):
            return {name: part.plain() for name, part in self.value.items()}
        if isinstance(self.value, list):
            return [part.plain() for part in self.value]
        return self.value


class _StrictLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (a class attribute of PyYAML)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAXIMUM_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAXIMUM_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _StrictDumper(yaml.SafeDumper):
    """Quotes what the strict loader would read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (a class attribute of PyYAML)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _StrictLoader.add_implicit_resolver(_tag, _pattern, _first)
    _StrictDumper.add_implicit_resolver(_tag, _pattern, _first)


def dump(value: Any) -> str:
    """YAML that `read` turns back into an equal value."""
    return yaml.dump(value, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, width=110)


def dump_inline(value: Any) -> str:
    """A scalar or list as YAML on one line."""
    text = yaml.dump(
        value, Dumper=_StrictDumper, default_flow_style=True, allow_unicode=True, width=float("inf")
    )
    text = text.removesuffix("\n").removesuffix("...").removesuffix("\n")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


class _Reader:
    """Turns composed nodes into Located values and collects what is wrong on the way."""

    def __init__(self, locate: Callable[[int], str]) -> None:
        self.locate = locate
        self.problems: list[str] = []
        self.values = 0

    def source(self, node: yaml.Node) -> str:
        return self.locate(node.start_mark.line + 1)

    def refuse(self, node: yaml.Node, problem: str) -> Located:
        self.problems.append(f"{self.source(node)}: {problem}")
        return Located(_REFUSED, self.source(node))

    def read(self, node: yaml.Node, depth: int = 0) -> Located:
        self.values += 1
        if self.values > MAXIMUM_VALUES or depth > MAXIMUM_DEPTH:
            raise _TooMuch(
                f"{self.source(node)}: more than {MAXIMUM_VALUES} values or {MAXIMUM_DEPTH} levels"
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self.read_mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            parts = [self.read(part, depth + 1) for part in node.value]
            return Located([part for part in parts if part.value is not _REFUSED], self.source(node))
        if isinstance(node, yaml.ScalarNode):
            return self.read_scalar(node)
        return self.refuse(node, f"the tag {node.tag} is not allowed; write a plain value")

    def read_mapping(self, node: yaml.MappingNode, depth: int) -> Located:
        parts: dict[str, Located] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse(key_node, "a key must be a name")
                continue
            name = key_node.value
            value = self.read(value_node, depth + 1)
            if name in parts:
                first = parts[name].source
                self.refuse(
                    key_node, f"{name}: given twice in one section, first at {first}; keep one of them"
                )
                continue
            parts[name] = Located(value.value, self.source(key_node))
        accepted = {name: part for name, part in parts.items() if part.value is not _REFUSED}
        return Located(accepted, self.source(node))

    def read_scalar(self, node: yaml.ScalarNode) -> Located:
        text = node.value
        if node.tag == _LEADING_ZERO:
            return self.refuse(
                node,
                f"{text}: a number must not start with 0 (8 or 10?); write it without, or in quotes if text",
            )
        kind = node.tag.removeprefix(_TAG)
        try:
            value = _CONVERSIONS[kind](text)
        except KeyError:
            return self.refuse(node, f"the tag {node.tag} is not allowed; write a plain value")
        except ValueError as error:
            return self.refuse(node, f"{text[:40]!r} is not a {kind}: {error}")
        return Located(value, self.source(node))


class _TooMuch(Exception):
    pass


def _to_int(text: str) -> int:
    if len(text) > 30:
        raise ValueError("more than 30 digits")
    return int(text.replace("_", ""))


def _to_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _to_bool(text: str) -> bool:
    if not _BOOL.match(text):
        raise ValueError("write true or false")
    return text.lower() == "true"


_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "str": str,
}


def read(text: str, locate: Callable[[int], str]) -> tuple[Located | None, list[str]]:
    """The one document in `text` and every problem found; None if it cannot be read at all.

    `locate` names a line, e.g. `lambda line: f"{path}:{line}"`.
    """
    if len(text.encode()) > MAXIMUM_BYTES:
        return None, [f"{locate(1)}: larger than {MAXIMUM_BYTES} bytes"]
    reader = _Reader(locate)
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Located(None, locate(1)), []
        document = reader.read(node)
        return (None if document.value is _REFUSED else document), reader.problems
    except _TooMuch as error:
        return None, [str(error)]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return None, [f"{locate(line)}: not valid YAML: {error.problem or error.context}"]
    except yaml.YAMLError as error:
        return None, [f"{locate(1)}: not valid YAML: {error}"]
