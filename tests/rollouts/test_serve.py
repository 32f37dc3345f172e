"""A server is not started where others could ask it without a key. Needs no vLLM."""

import os
import signal
import subprocess
import threading

import pytest

from grpo_lit.rollouts import serve
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.vllm_process import LEARNER_PID

KEY = "a key of twenty letters"


@pytest.fixture
def started(monkeypatch):
    """What vLLM would have been told, and its environment."""
    found = {}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(serve, "check_installed", lambda name: None)
    monkeypatch.setattr(serve, "_run_vllm", lambda words: found.update(words=words, env=dict(os.environ)))
    for name in (KEY_VARIABLE, LEARNER_PID):
        os.environ.pop(name, None)
    return found


def test_on_this_machine_a_key_is_made_and_shown_once(started, capsys):
    serve.main(["folder", "--max_length", "300"])
    key = started["env"][KEY_VARIABLE]
    assert len(key) > 40
    assert capsys.readouterr().out == f"export {KEY_VARIABLE}={key}  # for the learner too\n"
    words = started["words"]
    assert words[0] == "folder"
    assert {"--host=127.0.0.1", "--port=8000", "--max-model-len=300", "--enable-scale-out"} <= set(words)
    assert "--middleware=grpo_lit.rollouts.serve_guard.KeyGuard" in words
    assert key not in " ".join(words)
    assert started["env"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert started["env"][LEARNER_PID] == str(os.getpid())


def test_a_key_of_ones_own_is_never_shown(started, capsys):
    os.environ |= {KEY_VARIABLE: KEY, "VLLM_API_KEY": "another"}
    serve.main(["folder", "--max_length", "300", "--host", "0.0.0.0", "--options.max_num_seqs", "7"])
    assert capsys.readouterr().out == ""
    assert {"--host=0.0.0.0", "--max-num-seqs=7"} <= set(started["words"])
    assert started["env"][KEY_VARIABLE] == KEY
    assert "VLLM_API_KEY" not in started["env"]


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("0.0.0.0", None),
        ("::", None),
        ("10.0.0.2", None),
        ("node2", None),
        ("0.0.0.0", "short"),
        ("localhost", "short"),
    ],
)
def test_elsewhere_or_with_a_key_that_is_none_it_refuses(started, host, key):
    if key:
        os.environ[KEY_VARIABLE] = key
    with pytest.raises(SystemExit, match=f"`{KEY_VARIABLE}` expected a key of at least 16 characters .* at {host}"):
        serve.main(["folder", "--max_length", "300", "--host", host])
    assert started == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_addresses_of_this_machine(host):
    assert serve.is_this_machine(host)


def test_vllms_own_words_cannot_take_the_guard_away(started):
    serve.main(
        ["folder", "--max_length", "300", "--options.extra", '{"middleware": "other", "host": "0.0.0.0", "dp": 2}']
    )
    assert "--middleware=grpo_lit.rollouts.serve_guard.KeyGuard" in started["words"]
    assert "--host=127.0.0.1" in started["words"]
    assert "--dp=2" in started["words"]


def test_a_server_ends_with_the_learner_that_started_it(monkeypatch):
    ended, killed = threading.Event(), []
    monkeypatch.setattr(os, "kill", lambda *call: (killed.append(call), ended.set()))
    learner = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    monkeypatch.setenv(LEARNER_PID, str(learner.pid))
    serve._watch_learner()
    assert not ended.wait(0.1)
    learner.stdin.close()  # its end; `os.kill` only notes
    assert ended.wait(10)
    learner.wait()
    assert killed == [(os.getpid(), signal.SIGKILL)]
