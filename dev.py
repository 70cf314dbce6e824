#!/usr/bin/env python3
"""Run a command of this project in its own environment: python3 dev.py COMMAND [ARGUMENTS].

The first run makes a virtual environment in .venv and installs the exact versions of constraints.txt, with uv when
it is on PATH and with venv and pip otherwise; later runs start at once. Only the standard library is used here. The
file parses on Python 3.8, so that an older Python than the project needs is told so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

PROJECT = Path(__file__).resolve().parent
OLDEST = (3, 11)
EXTRAS = ("embedded", "encryption", "flower", "otel", "sentry")
TESTED = (*EXTRAS, "test")
SOURCES = ("umt_durable", "tests", "dev.py", "tools", "migrations", "examples", "benchmarks", "celeryconfig.py")

MATRIX = (
    "tests/celery/test_canvas_matrix.py",
    "tests/celery/test_canvas_crashes.py",
    "tests/celery/test_pools_runs.py",
    "tests/celery/test_final_signals.py",
    "tests/celery/test_bad_input.py",
    "tests/celery/test_outcomes.py",
    "tests/celery/test_ways_in_calls.py",
    "tests/celery/test_beat_runs.py",
    "tests/celery/test_traces.py",
    "tests/celery/test_awaited_tasks.py",
    "tests/celery/test_children_runs.py",
    "tests/celery/test_revoke_families.py",
    "tests/celery/test_parallel_runs.py",
    "tests/celery/test_existing_tasks.py",
    "tests/celery/test_sealed_runs.py",
    "tests/celery/test_begun_runs.py",
    "tests/celery/test_sql_starts.py",
    "tests/celery/test_worker_versions.py",
    "tests/scenarios/test_s18_ten_thousand_children.py",
    "tests/e2e/test_adopt.py",
    "tests/smoke/nodes",
    "tests/smoke/containers",
)

Programs = List[List[str]]


class Environment(NamedTuple):
    """A virtual environment; `writable` says whether caches may be written in the project folder beside it."""

    folder: Path
    writable: bool

    def program(self, name: str) -> str:
        """Return the path of an installed program, or the bare name when PATH has to find it."""
        path = self.folder / "bin" / name
        return str(path) if path.exists() else name

    def mark(self, group: str) -> Path:
        """Return the file that says for which requirements a group was installed."""
        return self.folder / ".dev" / group


class Command(NamedTuple):
    """One line of the help: `needs` names extras and dependency groups, `programs` are run in order.

    `apart` is set where the packages would disturb the other commands: they have an environment of their own then.
    """

    summary: str
    needs: Tuple[str, ...]
    programs: Callable[[Environment, List[str]], Programs]
    apart: bool = False


class SetupError(Exception):
    """Something is missing on this machine; the text says what and how to get it."""


def demo(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "examples.orders.demo", *arguments]]


def test(env: Environment, arguments: List[str]) -> Programs:
    # The suite starts real servers and workers and mostly waits for them: four at a time keep two cores busy. Files in
    # their order: the slow ones of real workers first, those of a second last.
    chosen = any(
        argument.startswith(("-n", "--numprocesses", "--pdb", "--trace", "-pno:xdist")) for argument in arguments
    )
    spread = [] if chosen else ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    cache = [] if env.writable else ["-o", f"cache_dir={env.folder / '.dev' / 'pytest'}"]
    return [[env.program("python"), "-m", "pytest", *spread, *cache, *arguments]]


def older(env: Environment, arguments: List[str]) -> Programs:
    chosen = any(argument.startswith("tests") for argument in arguments)
    return test(env, ["--postgres=older", "-k", "older", *arguments, *(() if chosen else ("tests/integration",))])


def matrix(env: Environment, arguments: List[str]) -> Programs:
    chosen = any(argument.startswith("tests") for argument in arguments)
    return test(env, ["-m", "long", *arguments, *(() if chosen else MATRIX)])


def lint(env: Environment, arguments: List[str]) -> Programs:
    cache = [] if env.writable else ["--no-cache"]
    return [
        [env.program("ruff"), "check", *cache, *arguments],
        [env.program("ruff"), "format", "--check", *cache],
        [env.program("lint-imports"), "--no-logo", *cache],
        [env.program("python"), "tools/gates.py"],
    ]


def types(env: Environment, arguments: List[str]) -> Programs:
    cache = [] if env.writable else [f"--cache-dir={env.folder / '.dev' / 'mypy'}"]
    present = [name for name in SOURCES if has_python(PROJECT / name)]
    return [[env.program("python"), "-m", "mypy", *cache, *(arguments or present)]]


def asked_for(argv: List[str]) -> List[str]:
    """Return the extras that a command line asks for by name: `exec celery -A umt_durable flower` needs Flower."""
    return ["flower"] if argv[0] == "exec" and "flower" in argv[1:] else []


def shell(env: Environment, arguments: List[str]) -> Programs:
    return [[os.environ.get("SHELL") or "/bin/sh", *arguments]]


def run(env: Environment, arguments: List[str]) -> Programs:
    if not arguments:
        raise SetupError("Name a program, for example: python3 dev.py exec celery -A umt_durable worker")
    return [[env.program(arguments[0]), *arguments[1:]]]


def celery_suite(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "tools.celery_suite", *arguments]]


def chaos(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "tools.chaos", *arguments]]


def crash_matrix(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "tools.crash_matrix", *arguments]]


def mutants(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "tools.mutants", *arguments]]


def prove(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("python"), "-m", "tools.prove", *arguments]]


def down(env: Environment, arguments: List[str]) -> Programs:
    return [[env.program("umt-durable"), "down", *arguments]]


COMMANDS: Dict[str, Command] = {
    "demo": Command("orders from a CSV file, through kills and a wiped broker", ("embedded",), demo),
    "test": Command("the test suite; arguments go to pytest", TESTED, test),
    "older": Command("the integration tests on the older Postgres that is reachable", TESTED, older),
    "matrix": Command(
        "the long suites: canvas on each broker and pool, beat, ten thousand children, pytest-celery's nodes",
        TESTED,
        matrix,
    ),
    "lint": Command("ruff, import contracts and the grep gates", ("lint",), lint),
    "types": Command("mypy --strict", (*TESTED, "lint"), types),
    "celery-suite": Command(
        "Celery's own integration tests, plain and durable", ("embedded", "celery-suite"), celery_suite, apart=True
    ),
    "chaos": Command("load under kills, freezes, cut connections and wiped brokers, then a check", TESTED, chaos),
    "crash-matrix": Command("each fail point x what happens there x pool x broker", TESTED, crash_matrix),
    "mutants": Command("planted bugs, each of which the tests have to find", TESTED, mutants),
    "prove": Command("crash matrix, chaos on both brokers, planted bugs; --ci is the short form", TESTED, prove),
    "shell": Command("your shell with the environment on PATH", ("embedded",), shell),
    "exec": Command("one program of the environment: exec celery -A umt_durable worker", ("embedded",), run),
    "down": Command("stop the embedded Postgres and Valkey of this folder", ("embedded",), down),
}


def has_python(path: Path) -> bool:
    """Tell whether mypy would find anything under a path."""
    return path.is_file() or any(path.rglob("*.py"))


def usage() -> str:
    """Return the help text: one line a command."""
    lines = ["usage: python3 dev.py COMMAND [ARGUMENTS]", ""]
    lines += [f"  {name:<14}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "Flower is installed where it is asked for: python3 dev.py exec celery -A umt_durable flower"]
    return "\n".join(lines)


def say(text: str) -> None:
    """Tell the person something; stdout belongs to the command."""
    print(text, file=sys.stderr, flush=True)


def check_machine(argv: Sequence[str]) -> None:
    """Refuse a Python or a system on which nothing here can work, naming what would do."""
    if os.name != "posix":
        raise SetupError("Linux or macOS is needed (on Windows: WSL).")
    if sys.version_info[:2] < OLDEST:
        newer = [name for name in (f"python3.{minor}" for minor in range(15, 10, -1)) if shutil.which(name)]
        hint = f"Try: {newer[0]} dev.py {' '.join(argv)}" if newer else "Install a newer one, then try again."
        raise SetupError(f"Python 3.11 or newer is needed; this one is {sys.version.split()[0]}. {hint}")


def places() -> Iterator[Path]:
    """Yield the folders that may hold the environment, best first."""
    if os.environ.get("DEV_VENV"):
        yield Path(os.environ["DEV_VENV"]).absolute()
        return
    yield PROJECT / ".venv"
    name = f"umt-durable-{hashlib.sha256(os.fsencode(PROJECT)).hexdigest()[:12]}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache) / name
    private = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    if is_private(private):
        yield private / "venv"


def is_private(folder: Path) -> bool:
    """Make a folder in a place shared with others, and tell whether it is ours alone: programs are run from it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def can_write(folder: Path) -> bool:
    """Tell whether this process may change a folder, or make it where it does not exist."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def requirements() -> Tuple[Dict[str, List[str]], str]:
    """Return the dependency groups of pyproject.toml, and a digest that changes with anything that is installed."""
    import tomllib

    tables = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = [tables["build-system"], tables["project"], tables["dependency-groups"], tables["tool"]["hatch"]]
    text = json.dumps(installed, sort_keys=True) + (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    return tables["dependency-groups"], hashlib.sha256(text.encode()).hexdigest()


def identity(folder: Path) -> str:
    """Return what an environment is tied to: its own path and the interpreter behind it."""
    return f"{folder}\n{PROJECT}\n{os.path.realpath(folder / 'bin' / 'python')}\n"


def read(path: Path) -> str:
    """Return the text of a mark file, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def missing(env: Environment, needs: Sequence[str], digest: str) -> List[str]:
    """Return the groups whose mark does not say that these very requirements are installed."""
    whole = os.access(env.folder / "bin" / "python", os.X_OK) and read(env.mark("made")) == identity(env.folder)
    return [group for group in ("core", *needs) if not whole or read(env.mark(group)) != digest]


def prepare(needs: Sequence[str], apart: str = "") -> Environment:
    """Return an environment in which the needed groups are installed, making or completing it where necessary.

    With a name in `apart` it is another one, beside that of the other commands.
    """
    import fcntl

    groups, digest = requirements()
    refused = []
    for place in places():
        folder = place.with_name(f"{place.name}-{apart}") if apart else place
        env = Environment(folder, can_write(PROJECT))
        if not missing(env, needs, digest):
            return env
        if can_write(folder):
            break
        refused.append(str(folder))
    else:
        raise SetupError(
            f"Nothing can be installed: {', '.join(refused)} cannot be written. Name a folder in DEV_VENV."
        )
    # The lock is on the project folder itself, so that nothing is left behind; it ends with this process.
    lock = os.open(PROJECT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = missing(env, needs, digest)
        if wanted:
            install(env, wanted, groups)
            for group in wanted:
                env.mark(group).write_text(digest)
    finally:
        os.close(lock)
    return env


def install(env: Environment, wanted: Sequence[str], groups: Dict[str, List[str]]) -> None:
    """Make the environment where needed and install the wanted groups at the versions of constraints.txt."""
    say(f"Setting up {', '.join(wanted)} in {env.folder} (the first time this fetches some 60 MB) ...")
    uv = shutil.which("uv")
    make(env, uv)
    extras = [name for name in wanted if name in EXTRAS]
    packages = [requirement for name in wanted for requirement in groups.get(name, ())]
    if extras or "core" in wanted:
        packages += ["-e", f".[{','.join(extras)}]" if extras else "."]
    python = str(env.folder / "bin" / "python")
    installer = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    call([*installer, "--quiet", "-c", "constraints.txt", *packages])


def make(env: Environment, uv: Optional[str]) -> None:
    """Make the virtual environment, or leave it when it works, is where it was made, and has an installer."""
    folder, made = env.folder, read(env.mark("made"))
    works = os.access(folder / "bin" / "python", os.X_OK) and made in ("", identity(folder))
    if folder.exists() and not works:
        if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
            raise SetupError(f"{folder} exists and is no virtual environment; move it away.")
        shutil.rmtree(folder)
    if not works or not (uv or any(folder.glob("lib/python*/site-packages/pip"))):
        # Started from a virtual environment, this process may just have removed its own interpreter.
        base = getattr(sys, "_base_executable", sys.executable)
        if uv:
            call([uv, "venv", "--quiet", "--python", base, str(folder)])
        elif not has_ensurepip():
            raise SetupError(
                "This Python cannot make virtual environments: its module ensurepip is missing.\n"
                "  Debian, Ubuntu:  apt install python3-venv\n"
                "  or anywhere:     put uv on PATH; it is used when it is there"
            )
        else:
            call([base, "-m", "venv", str(folder)])
    env.mark("made").parent.mkdir(exist_ok=True)
    env.mark("made").write_text(identity(folder))


def has_ensurepip() -> bool:
    """Tell whether venv can bring pip along. A removed package may leave an empty folder that still imports."""
    found = importlib.util.find_spec("ensurepip")
    return found is not None and found.origin is not None


def call(command: Sequence[str]) -> None:
    """Run one part of the set-up in the project folder; raise SetupError when it fails."""
    # A wrong user-wide setting must not reach in; a home that cannot be written holds no cache.
    environ = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Behind a proxy that re-signs TLS, a uv older than its system-certs setting knows no issuer.
    environ.setdefault("UV_NATIVE_TLS", "1")
    home = os.path.expanduser("~")
    if not (os.path.isabs(home) and can_write(Path(home))):
        environ.update(PIP_NO_CACHE_DIR="1", UV_NO_CACHE="1")
    status = subprocess.run(
        command, check=False, cwd=PROJECT, env=environ, stdin=subprocess.DEVNULL, stdout=2
    ).returncode
    if status:
        raise SetupError(f"Set-up failed: {' '.join(command[:4])} ended with status {status}.")


def start(programs: Programs, env: Environment) -> int:
    """Run programs in the project folder. A single one takes this process over: signals and exit status are its own."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    environ["VIRTUAL_ENV"] = str(env.folder)
    environ["PATH"] = os.pathsep.join([str(env.folder / "bin"), os.environ.get("PATH", os.defpath)])
    os.chdir(PROJECT)
    if len(programs) == 1:
        os.execvpe(programs[0][0], programs[0], environ)
    failed = {}
    for program in programs:
        say(f"$ {' '.join(program)}")
        status = subprocess.run(program, check=False, env=environ).returncode
        if status:
            failed[" ".join(program)] = status
    # Said last: what failed first may have scrolled away.
    for line, status in failed.items():
        say(f"Failed with status {status}: {line}")
    return next(iter(failed.values()), 0)


def main(argv: List[str]) -> int:
    """Run one command and return its exit status: 2 when there is no such command, 1 when set-up is not possible."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] not in COMMANDS:
        say(f"There is no command {argv[0]!r}.\n\n{usage()}")
        return 2
    command = COMMANDS[argv[0]]
    try:
        check_machine(argv)
        env = prepare([*command.needs, *asked_for(argv)], argv[0] if command.apart else "")
        return start(command.programs(env, argv[1:]), env)
    except (SetupError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
