"""A real `mlflow server` on loopback that can be away for a while."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from mlflow import MlflowClient


class MlflowServer:
    """Keeps its database in `folder`; the same address at every start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = f"sqlite:///{folder}/mlflow.db"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        MlflowClient(self.database).search_experiments(max_results=1)  # makes the schema

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
        command += ["--port", str(self._port), "--backend-store-uri", self.database]
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,  # it keeps artifacts there
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
