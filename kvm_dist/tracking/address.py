"""The tracking URI: which are refused, where a local store lives, and what may be shown of it."""

import base64
import configparser
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvm_dist.exit_codes import ConfigError, StorageError

_SQLITE = "sqlite:///"
_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|token|secret|credentials?|(api|access|private)_?key)(_|$)", re.IGNORECASE
)
_SHORTEST_SECRET = 6  # shorter values of the environment are words such as "true"
_MLFLOW_PREFIX = "MLFLOW_TRACKING_"
_LOGIN_VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def absolute_uri(uri: str) -> str:
    """The URI with a sqlite path made absolute and its folder made. Raises ConfigError for plain folders."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        raise ConfigError(
            f"tracking.uri={uri!r}: MLflow no longer writes plain folders; use sqlite:///PATH/mlflow.db or "
            "the address of a server, http://HOST:PORT (`mlflow migrate-filestore` moves old runs)"
        )
    path = sqlite_path(uri)
    if path is None:
        return uri
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"tracking.uri={uri!r}: cannot make {path.parent} ({error.strerror})") from error
    query = uri.partition("?")[2]
    return f"{_SQLITE}{path}" + (f"?{query}" if query else "")


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, absolute; None for other stores."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute()


def artifact_location(uri: str, experiment: str) -> str | None:
    """Artifacts lie beside a sqlite database; a server knows its own place (None)."""
    path = sqlite_path(uri)
    if path is None:
        return None
    folder = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment).lstrip(".") or "experiment"
    return (path.parent / "mlartifacts" / folder).as_uri()


def redact_uri(uri: str) -> str:
    """The URI without user, password and query values: fit for logs and run directories."""
    if "://" not in uri:
        return uri
    return re.sub(r"([?&][^=&\s]+)=[^&\s]*", rf"\1={_HIDDEN}", re.sub(r"://[^/\s]*@", f"://{_HIDDEN}@", uri))


def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def secrets_of(uri: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Texts that must not appear in a log: credentials in the URI, the environment and MLflow's own file.

    Longest first, so that none is left in part.
    """
    parts = urlsplit(uri)
    login = parts.netloc.rpartition("@")[0]
    password = login.partition(":")[2]
    found = {login, password, unquote(password)}
    if sqlite_path(uri) is None:
        found |= {value for _, value in parse_qsl(parts.query)}
    found |= {
        value
        for name, value in environment.items()
        if is_secret_name(name) and (len(value) >= _SHORTEST_SECRET or name.startswith(_MLFLOW_PREFIX))
    }
    for name, password in _logins(environment):
        found |= {password, base64.b64encode(f"{name}:{password}".encode()).decode()}  # as sent in a header
    return sorted(found - {""}, key=len, reverse=True)


def _logins(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """User and password for the server, where MLflow looks for them."""
    file = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        file.read(Path(environment.get("HOME", "~"), ".mlflow", "credentials").expanduser())
    stored = [file.get("mlflow", name.lower(), fallback="") for name in _LOGIN_VARIABLES]
    given = [environment.get(name, "") for name in _LOGIN_VARIABLES]
    yield given[0] or stored[0], given[1] or stored[1]
    yield stored[0], stored[1]


def scrub(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text
