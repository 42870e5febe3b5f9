"""The strict reader: what YAML guesses wrongly is read as meant or refused, and nothing is unbounded."""

from typing import Any

import pytest

from kvm_dist import strict_yaml


def read(text: str) -> Any:
    document, problems = strict_yaml.read(text, lambda line: f"x:{line}")
    assert problems == []
    assert document is not None
    return document.plain()


def refused(text: str) -> list[str]:
    _, problems = strict_yaml.read(text, lambda line: f"x:{line}")
    assert problems
    return problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.0", -0.0),
        ("1_000_000", 1_000_000),
        ("-7", -7),
        ("0", 0),
        ("12:30:00", "12:30:00"),
        ("2026-01-31", "2026-01-31"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'010'", "010"),
        ("0x1F", "0x1F"),
        (".inf", ".inf"),
        ("nan", "nan"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_scalar_is_read_as_meant(text: str, value: object) -> None:
    found = read(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["010", "-010", "00", "08", "0_1"])
def test_a_number_with_a_leading_zero_is_refused(text: str) -> None:
    assert refused(f"a: 1\nkey: {text}") == [
        f"x:2: {text}: a number must not start with 0 (8 or 10?); write it without, or in quotes if text"
    ]


def test_equal_keys_are_refused_with_both_lines() -> None:
    assert refused("a:\n  b: 1\n  c: 2\n  b: 3\n") == [
        "x:4: b: given twice in one section, first at x:2; keep one of them"
    ]
    assert read("a: {b: 1}\nc: {b: 2}") == {"a": {"b": 1}, "c": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: !!python/object/apply:os.system [echo]", 2),
        ("a: !!binary aGk=", 1),
        ("a: !mine 3", 1),
        ("a: !!timestamp 2026-01-01", 1),
        ("a: !!set {x: null}", 1),
    ],
)
def test_tags_are_refused(text: str, line: int) -> None:
    (problem,) = refused(text)
    assert problem.startswith(f"x:{line}: the tag ")


def test_a_merge_key_is_an_ordinary_name() -> None:
    assert read("a: &x {b: 1}\nc: {<<: *x}")["c"] == {"<<": {"b": 1}}


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: 'open", "a: b: c", "\tx: 1", "a: *nowhere", "a: %x", "a: \x00"]
)
def test_broken_yaml_is_refused_with_its_line(text: str) -> None:
    (problem,) = refused(text)
    assert problem.startswith("x:")
    assert "not valid YAML" in problem


def test_only_one_document_is_read() -> None:
    assert "x:2: not valid YAML" in refused("a: 1\n--- \nb: 2\n")[0]


def test_a_key_must_be_a_name() -> None:
    assert refused("? [a, b]\n: 1\n") == ["x:1: a key must be a name"]
    assert read("1: a\ntrue: b") == {"1": "a", "true": "b"}


def test_deep_nesting_is_refused() -> None:
    depth = strict_yaml.MAXIMUM_DEPTH
    assert read("[" * (depth - 1) + "]" * (depth - 1)) is not None
    assert "nested deeper" in refused("[" * 20_000)[0]


def test_an_alias_may_be_used_but_not_to_blow_up() -> None:
    assert read("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert "more than" in refused(bomb)[0]


def test_an_alias_of_itself_is_refused() -> None:
    assert "more than" in refused("a: &x [*x]")[0]


def test_a_large_text_is_refused_before_it_is_read() -> None:
    assert "larger than" in refused("a: " + "x" * strict_yaml.MAXIMUM_BYTES)[0]


@pytest.mark.parametrize("text", ["1e999", "9" * 40, "!!int x", "!!bool maybe"])
def test_a_number_that_cannot_be_held_is_refused(text: str) -> None:
    assert refused(f"a: {text}")[0].startswith("x:1: ")


def test_every_value_knows_its_line() -> None:
    document, _ = strict_yaml.read("a: 1\nb:\n  c: 2\n  d:\n    - 3\n", lambda line: f"x:{line}")
    assert document is not None
    assert document.value["a"].source == "x:1"
    assert document.value["b"].source == "x:2"
    assert document.value["b"].value["c"].source == "x:3"
    assert document.value["b"].value["d"].source == "x:4"
    assert document.value["b"].value["d"].value[0].source == "x:5"
