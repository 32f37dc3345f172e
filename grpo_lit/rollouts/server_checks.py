"""What vLLM servers are asked to be, and what is wrong where they are not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.serve import is_this_machine


def check_addresses(urls: Sequence[str] | None, servers: int, transport: str) -> None:
    """Refuse addresses that are none, or that weights could not reach.

    Args:
        urls: Of servers that run already; ``None``: some are started here.
        servers: How many.
        transport: How weights travel.

    Raises:
        ConfigError: Names the key.
    """
    if urls is not None and not urls:
        raise ConfigError("`urls` expected at least one address, or null to start servers here, but got []")
    if servers < 1:
        raise ConfigError(f"`servers` expected at least 1, but got {servers}")
    for url in urls or ():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"`urls` expected addresses such as http://127.0.0.1:8000, but got {url!r}")
        if transport == "shared_memory" and not is_this_machine(parts.hostname):
            raise ConfigError(
                f"`transport` expected shared_file or process_group for a server on another machine, but got "
                f"shared_memory with {url}: name a folder that both see, or call this machine 127.0.0.1"
            )


def check_transport(transport: str, folder: Path | None, host: str | None) -> None:
    """Refuse a folder or an address that the transport does not use, and one that is no address of this machine's own.

    Args:
        transport: How weights travel.
        folder: Where ``shared_file`` puts them.
        host: Where ``process_group`` listens.

    Raises:
        ConfigError: Names the key.
    """
    if (transport == "shared_file") != (folder is not None):
        raise ConfigError(
            f"`transport_folder` expected a folder with `transport: shared_file` and none otherwise, but got "
            f"{folder} with {transport}: set both, or neither"
        )
    if host is not None and (transport != "process_group" or host in ("", "0.0.0.0", "::")):
        raise ConfigError(
            f"`transport_host` expected one address of this machine, with `transport: process_group` only, but got "
            f"{host!r} with {transport}: name the one that the servers reach, or null"
        )


def agreed_settings(settings: Sequence[dict[str, Any]], model: EngineModel) -> tuple[torch.dtype, int]:
    """Return the precision and the vocabulary of all servers.

    Args:
        settings: What each says of itself.
        model: What they are to sample with.

    Raises:
        ConfigError: One samples otherwise, or has no room for the model's lengths, or they differ.
    """
    for server in settings:
        if server["logprobs_mode"] != "processed_logprobs":
            raise ConfigError(
                "`urls` expected servers whose logprobs_mode is processed_logprobs (after temperature and top-k), "
                f"but got {server['logprobs_mode']}: start them with scripts/serve"
            )
        if server["max_length"] < model.max_length:
            raise ConfigError(
                f"`max_length` of scripts/serve expected at least {model.max_length} (data.max_prompt_tokens plus "
                f"data.sampling.max_tokens), but got {server['max_length']}: start the server again with more"
            )
    kinds = {(server["dtype"], server["vocabulary"]) for server in settings}
    if len(kinds) > 1:
        raise ConfigError(f"`urls` expected servers alike, but got dtype and vocabulary {sorted(kinds)}")
    ((name, vocabulary),) = kinds
    return getattr(torch, name), vocabulary
