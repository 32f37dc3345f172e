"""Runs of this checkout in processes of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def python(*words: str, cwd: Path | None = None) -> None:
    """Run Python with a free port for its ranks to meet at; it must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(REPO), str(REPO / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
