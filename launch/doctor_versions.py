"""Whether the packages installed here are ones this program works with, and fit together. No torch."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path

from kvm_dist.config import RunConfig
from launch.finding import Finding

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"  # versions that the tests passed with

# distribution: lowest version, first version that is too new
REQUIREMENTS: dict[str, tuple[str, str | None]] = {
    "torch": ("2.10", "2.14"),
    "triton": ("3.6", None),
    "deepspeed": ("0.19.8", None),
    "flash-linear-attention": ("0.6", None),
    "transformers": ("5.6.2", "6"),
    "webdataset": ("1.0", None),
    "mlflow": ("3.17", None),
    "submitit": ("1.5.3", None),
    "safetensors": ("0.5", None),
    "pydantic": ("2.10", None),
}
# distribution: first bad version, first good one again, why
KNOWN_BAD: dict[str, tuple[str, str, str]] = {
    "deepspeed": ("0.17.6", "0.19.4", "ZeRO-2 loses part of a gradient that is used twice in one backward"),
}
# What else their own metadata may ask for in one version and no other.
PARTS = ("fla-core", "mlflow-skinny", "mlflow-tracing", "pydantic-core")
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\s*\(?(?P<bounds>[^;()\[\]]*)\)?\s*(;(?P<marker>.*))?$")
_BOUND = re.compile(r"^(==|>=|<=|!=|<|>)\s*([0-9][^,*]*)$")
_COMPARED: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": eq,
    ">=": ge,
    "<=": le,
    "!=": ne,
    "<": lt,
    ">": gt,
}


def check_versions(config: RunConfig) -> Iterator[Finding]:
    for name, (lowest, too_new) in REQUIREMENTS.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "triton" or sys.platform == "linux":
                yield Finding(name, "fail", "not installed", f"pip install '{name}>={lowest}'")
            continue
        yield judge_version(name, installed, lowest, too_new)


def judge_version(name: str, installed: str, lowest: str, too_new: str | None) -> Finding:
    """Whether `installed` is one of the versions that this program was tested with."""
    version = release(installed)
    wanted = f"pip install '{name}>={lowest}" + (f",<{too_new}'" if too_new else "'")
    if name in KNOWN_BAD:
        first, fixed, why = KNOWN_BAD[name]
        if release(first) <= version < release(fixed):
            return Finding(name, "fail", f"{installed}: {why}", wanted)
    if version < release(lowest) or (too_new is not None and version >= release(too_new)):
        return Finding(name, "fail", installed, wanted)
    return Finding(name, "ok", installed)


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); what follows the numbers does not count."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return (*numbers, *([0] * (4 - len(numbers))))


def check_pairs(config: RunConfig) -> Iterator[Finding]:
    """Packages installed one by one, which do not go together by their own word."""
    names = (*REQUIREMENTS, *PARTS)
    installed = {name: version for name in names if (version := _installed(name)) is not None}
    broken = [finding for name in installed for finding in _broken(name, installed)]
    yield from broken or [
        Finding("packages together", "ok", f"{len(installed)} ask for no other of another version")
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _broken(name: str, installed: dict[str, str]) -> Iterator[Finding]:
    for line in importlib.metadata.requires(name) or ():
        matched = _REQUIREMENT.match(line)
        if matched is None or (other := matched["name"].lower().replace("_", "-")) not in installed:
            continue
        if matched["marker"] and not _is_for_here(matched["marker"]):
            continue
        bounds = matched["bounds"].strip()
        if not all(_holds(installed[other], bound.strip()) for bound in bounds.split(",")):
            found = f"{name} {installed[name]} wants {other}{bounds}, installed is {installed[other]}"
            yield Finding(f"{name} with {other}", "fail", found, f"pip install '{other}{bounds}'")


def _is_for_here(marker: str) -> bool:
    """Of the markers that packages use for each other: extras are not asked for, systems are compared."""
    systems = re.findall(r"(?:platform_system|sys_platform) *== *['\"](\w+)['\"]", marker)
    return "extra" not in marker and all(system.lower() == sys.platform for system in systems)


def _holds(version: str, bound: str) -> bool:
    """Whether a version is within one bound; a bound of another form is not judged."""
    matched = _BOUND.match(bound)
    return matched is None or _COMPARED[matched[1]](release(version), release(matched[2]))


def check_tested(config: RunConfig) -> Iterator[Finding]:
    """Which versions differ from those that the tests passed with; they may work as well."""
    if not CONSTRAINTS.is_file():
        return  # not a clone
    tested = tested_versions()
    own = {name: _installed(name) for name in REQUIREMENTS}
    differing = [
        f"{name} {version} (tested: {tested[name]})"
        for name, version in own.items()
        if version is not None and name in tested and release(version) != release(tested[name])
    ]
    found = "; ".join(differing) or f"all {len(REQUIREMENTS)} as in {CONSTRAINTS.name}"
    yield Finding("tested versions", "ok", found)


def tested_versions() -> dict[str, str]:
    """Distribution -> version of the installation that passed the tests."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {name: version for name, _, version in pairs}
