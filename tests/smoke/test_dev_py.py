"""dev.py without installing anything: the environments here are links to the interpreter that runs the tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dev

PROJECT = dev.PROJECT

MAKE_BLIND = "import runpy, sys; sys.modules['ensurepip'] = None; runpy.run_path('dev.py', run_name='__main__')"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what dev.py reads, with the module pointed at it and no uv, home or foreign environment in reach."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("dev.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(dev.PROJECT / name, folder)
    monkeypatch.setattr(dev, "PROJECT", folder)
    for name in ("DEV_VENV", "XDG_CACHE_HOME", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def complete(project: Path, *groups: str) -> dev.Environment:
    """Make an environment whose marks say that the groups are installed."""
    env = dev.Environment(project / ".venv", True)
    env.mark("made").parent.mkdir(parents=True)
    (env.folder / "bin").mkdir()
    (env.folder / "bin" / "python").symlink_to(sys.executable)
    (env.folder / "pyvenv.cfg").touch()
    env.mark("made").write_text(dev.identity(env.folder))
    for group in groups:
        env.mark(group).write_text(dev.requirements()[1])
    return env


def dev_py(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "dev.py", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60)


def test_alone_it_prints_help_and_installs_nothing(project: Path) -> None:
    done = dev_py(project)

    assert done.returncode == 0
    assert done.stderr == ""
    assert all(f"  {name} " in done.stdout for name in dev.COMMANDS)
    assert not (project / ".venv").exists()


def test_an_unknown_command_prints_the_list_and_exits_with_2(project: Path) -> None:
    done = dev_py(project, "tset")

    assert done.returncode == 2
    assert done.stdout == ""
    assert "no command 'tset'" in done.stderr
    assert "  test " in done.stderr


def test_it_parses_on_python_3_8_and_tells_an_old_python_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "OLDEST", (99, 0))

    ast.parse(Path(dev.__file__).read_text(), feature_version=(3, 8))
    with pytest.raises(dev.SetupError, match=r"Python 3\.11 or newer is needed; this one is 3\."):
        dev.check_machine(["test"])


def test_without_ensurepip_and_uv_it_names_both_ways_out(project: Path) -> None:
    command = [sys.executable, "-c", MAKE_BLIND, "demo"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert "uv" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / ".venv").exists()


def test_arguments_and_exit_status_pass_through_and_stdout_is_the_commands(project: Path) -> None:
    complete(project, "core", "embedded")

    done = dev_py(project, "exec", "python", "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "-k", "a b")

    assert done.returncode == 7
    assert done.stdout == "['-k', 'a b']\n"
    assert done.stderr == ""


def test_signals_reach_the_command(project: Path) -> None:
    complete(project, "core", "embedded")
    program = "import os, signal, sys; print(os.getpid(), flush=True); signal.sigwait([signal.SIGUSR1]); sys.exit(9)"
    blocked = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); {program}"
    command = [sys.executable, "dev.py", "exec", "python", "-c", blocked]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())

        process.send_signal(signal.SIGUSR1)

        assert process.wait(timeout=30) == 9
        assert child == process.pid


def test_flower_is_installed_only_where_a_command_names_it(project: Path) -> None:
    assert all("flower" not in dev.COMMANDS[name].needs for name in ("exec", "shell", "demo", "down"))
    assert dev.asked_for(["exec", "celery", "-A", "umt_durable", "flower"]) == ["flower"]
    assert dev.asked_for(["exec", "celery", "-A", "umt_durable", "worker"]) == []
    assert dev.asked_for(["test", "-k", "flower"]) == []
    assert "exec celery -A umt_durable flower" in dev_py(project).stdout


def test_celerys_suite_has_an_environment_of_its_own(project: Path) -> None:
    complete(project, "core", "embedded", "celery-suite")

    env = dev.prepare(("embedded",))

    assert env.folder == project / ".venv"
    assert dev.COMMANDS["celery-suite"].apart
    assert [name for name, command in dev.COMMANDS.items() if command.apart] == ["celery-suite"]
    assert dev.celery_suite(env, ["-k", "a"])[0][1:] == ["-m", "tools.celery_suite", "-k", "a"]


def test_the_demo_is_a_module_so_that_its_folder_hides_no_other_module(project: Path) -> None:
    [command] = dev.demo(dev.Environment(project / ".venv", True), ["--seed", "3"])

    assert command[1:] == ["-m", "examples.orders.demo", "--seed", "3"]


def test_an_installed_group_is_not_installed_again_until_the_requirements_change(project: Path) -> None:
    env = complete(project, "core", "lint")
    digest = dev.requirements()[1]
    assert dev.missing(env, ("lint",), digest) == []
    assert dev.missing(env, ("lint", "test"), digest) == ["test"]

    with (project / "pyproject.toml").open("a") as file:
        file.write("\n[tool.unrelated]\nkey = 1\n")
    assert dev.requirements()[1] == digest

    with (project / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    assert dev.missing(env, ("lint",), dev.requirements()[1]) == ["core", "lint"]


def test_a_moved_environment_counts_as_not_installed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(project, "core")

    moved = project.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(dev, "PROJECT", moved)

    assert dev.missing(dev.Environment(moved / ".venv", True), (), dev.requirements()[1]) == ["core"]


def test_a_folder_that_is_no_environment_is_left_alone(project: Path) -> None:
    env = dev.Environment(project / ".venv", True)
    env.folder.mkdir()
    (env.folder / "thesis.txt").touch()

    with pytest.raises(dev.SetupError, match="no virtual environment"):
        dev.make(env, None)
    assert (env.folder / "thesis.txt").exists()


def test_with_nothing_to_write_into_it_says_which_folders_were_tried(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "can_write", lambda folder: False)

    with pytest.raises(dev.SetupError, match="DEV_VENV") as refused:
        dev.prepare(())
    assert str(project / ".venv") in str(refused.value)


def test_a_project_that_cannot_be_written_uses_a_cache_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.parent / "cache"))

    first, second, *_ = dev.places()

    assert first == project / ".venv"
    assert second.parent == project.parent / "cache"


def test_a_shared_temporary_folder_is_used_only_when_it_is_ours_alone(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)

    assert dev.is_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert not dev.is_private(open_to_all)
    assert not dev.is_private(tmp_path / "link")


@pytest.mark.parametrize(
    ("arguments", "spread"),
    [([], True), (["-k", "foo"], True), (["-n", "0"], False), (["-n4"], False), (["--pdb"], False)],
)
def test_the_suite_runs_three_at_a_time_unless_told_otherwise(arguments: list[str], spread: bool) -> None:
    env = dev.Environment(Path(os.devnull), True)

    [program] = dev.test(env, arguments)

    assert ("loadfile" in program) is spread
    assert program[len(program) - len(arguments) :] == arguments


def test_the_test_command_installs_every_program_that_the_tests_start() -> None:
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    extras, groups = config["project"]["optional-dependencies"], config["dependency-groups"]
    wanted = [groups.get(name) or extras[name] for name in dev.COMMANDS["test"].needs]
    lines = [line for part in [config["project"]["dependencies"], *wanted] for line in part]
    installed = {re.split(r"[^\w-]", line)[0] for line in lines}

    sources = [path.read_text(encoding="utf-8") for path in (PROJECT / "tests").rglob("*.py")]
    started = {name for source in sources for name in re.findall(r'"-m", "(\w+)"', source)}

    assert started >= {"celery", "mypy"}
    assert started - installed == set()
