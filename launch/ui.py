"""MLflow's user interface over a run root, on the loopback address only."""

import os
import socket
import sys
from pathlib import Path

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ConfigError
from parallel.placement import LOOPBACK


def serve(run_root: Path, port: int) -> None:
    """Become the MLflow server; ends with Ctrl-C."""
    if not run_root.is_dir():
        raise ConfigError(f"{run_root}: no such folder; give the runs' folder with --run-root")
    _require_free(port)
    store = RunConfig(run_root=run_root.absolute()).tracking_uri
    print(f"kvm-dist: http://{LOOPBACK}:{port} shows {store}; end with Ctrl-C", flush=True)
    os.execv(sys.executable, command(store, port))


def _require_free(port: int) -> None:
    """MLflow would start, find the port taken and end as if all were well."""
    with socket.socket() as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: not the last one's echo
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {LOOPBACK}: {error.strerror}; choose another one with --port"
            ) from error


def command(store: str, port: int) -> list[str]:
    arguments = ["ui", "--host", LOOPBACK, "--port", str(port), "--backend-store-uri", store]
    return [sys.executable, "-m", "mlflow", *arguments]
