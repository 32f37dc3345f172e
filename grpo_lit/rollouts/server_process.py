"""Servers that the learner starts for itself on this machine, and ends with itself."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.vllm_options import VLLMOptions
from grpo_lit.rollouts.vllm_process import LEARNER_PID, child_environment, end_processes, own_device

#: Last lines of a server's output that an error shows.
_LINES = 15


class ServerProcess:
    """One ``scripts/serve`` on 127.0.0.1, at a port that was free.

    Args:
        model: Folder or hub id.
        max_length: Most tokens of a prompt and its completion together.
        options: How vLLM runs the model.
        key: What it asks for.
        log: File for its output.
    """

    def __init__(self, model: str, max_length: int, options: VLLMOptions, key: str, log: Path) -> None:
        self.log, port = log, _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [f"--max_length={max_length}", f"--port={port}", f"--options={json.dumps(asdict(options))}"]
        variables = {KEY_VARIABLE: key, LEARNER_PID: str(os.getpid())} | own_device(options.tensor_parallel_size)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_lit.rollouts.serve", model, *words],
                env=child_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the learner, which ends its servers
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LINES:]) or "(nothing)"

    def ask_to_end(self) -> list[psutil.Process]:
        """Ask it to end, and return all of its processes."""
        if not self.is_alive():
            return []
        process = psutil.Process(self._process.pid)
        everything = [process, *process.children(recursive=True)]
        self._process.terminate()
        return everything

    def collect(self) -> None:
        """Wait for its exit status, so that no zombie stays."""
        self._process.wait()


def end_servers(servers: Sequence[ServerProcess]) -> None:
    """End servers with all of their processes, all at the same time."""
    end_processes([process for server in servers for process in server.ask_to_end()])
    for server in servers:
        server.collect()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
