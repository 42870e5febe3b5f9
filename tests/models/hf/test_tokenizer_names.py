"""Names of tokenizers that nobody has, asked of a Hub on this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

_ANSWERS = re.compile("^(HF|TRANSFORMERS)_|_proxy$", re.IGNORECASE)  # what else decides who is asked
PROGRAM = """
import sys
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.exit_codes import ConfigError
try:
    build_tokenizer(sys.argv[1])
except ConfigError as error:
    print(error)
"""


class Knows(BaseHTTPRequestHandler):
    """A Hub that has nothing; `asked` are the paths of all requests."""

    asked: list[str]

    def answer(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


class HangsUp(Knows):
    """A Hub behind something that takes connections and ends them."""

    def answer(self) -> None:
        self.asked.append(self.path)
        self.close_connection = True

    do_GET = do_HEAD = answer


@contextmanager
def hub(kind: type[Knows]) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), type("Hub", (kind,), {"asked": asked})) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "name", "settings", "requests", "said"),
    [
        (Knows, "some/rwkv-wrold", {}, 1, "has no such name"),
        (HangsUp, "rwkv-wrold", {}, 1, "cannot be reached"),
        (Knows, "rwkv-wrold", {"HF_HUB_OFFLINE": "1"}, 0, "HF_HUB_OFFLINE forbids"),
        (Knows, "./some/folder/gone", {}, 0, "no name on the Hub"),
    ],
    ids=["unknown", "unreachable", "offline", "no name"],
)
def test_a_name_that_nobody_has_is_asked_for_once_and_refused_with_the_mend(
    kind: type[Knows], name: str, settings: dict[str, str], requests: int, said: str, tmp_path: Path
) -> None:
    with hub(kind) as (address, asked):
        environment = {
            **{name: value for name, value in os.environ.items() if not _ANSWERS.search(name)},
            **{"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"},
            **settings,
        }
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True
        )
    assert len(asked) == requests, ended.stderr
    assert f"tokenizer {name!r} could not be loaded: no such folder" in ended.stdout, ended.stderr
    assert said in ended.stdout
    assert "give a folder that holds a tokenizer.json" in ended.stdout
    assert "or use bytes or rwkv-world" in ended.stdout
    assert "Retrying" not in ended.stderr
