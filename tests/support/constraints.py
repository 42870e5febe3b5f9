"""The versions of everything that this program needs, as installed here: those that the tests pass with.

    python -m tests.support.constraints > constraints.txt

Extras are left out, and local labels such as +cpu: a version is the same for every device.
"""

import importlib.metadata
import sys

from packaging.requirements import Requirement

HEADER = """\
# Versions that the tests passed with on Linux, Python {python}: pip install -e . -c constraints.txt
# Written by: python -m tests.support.constraints > constraints.txt
"""


def needed(name: str = "kvm-dist") -> dict[str, str]:
    """Distribution -> version of all that `name` needs, directly or not, itself left out."""
    found: dict[str, str] = {}
    waiting = [Requirement(name)]
    while waiting:
        wanted = waiting.pop()
        for line in importlib.metadata.requires(wanted.name) or ():
            requirement = Requirement(line)
            extras = ("", *wanted.extras)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
                continue
            key = requirement.name.lower().replace("_", "-")
            if key not in found or requirement.extras:
                found[key] = importlib.metadata.version(key).partition("+")[0]
                waiting.append(requirement)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print(HEADER.format(python=".".join(map(str, sys.version_info[:2]))), end="")
    print("\n".join(f"{name}=={version}" for name, version in needed().items()))
