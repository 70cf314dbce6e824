from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from umt_durable import failpoints
from umt_durable.errors import ConfigurationError

PACKAGE = Path(failpoints.__file__).parent

REFUSED = [
    ("step.nowhere=kill", "not a declared"),
    ("kill", "not a declared"),
    ("claim.a=", "is no action"),
    ("claim.a=explode", "is no action"),
    ("claim.a=kill:9", "is no action"),
    ("claim.a=sleep:", "is no action"),
    ("claim.a=sleep:-1", "is no action"),
    ("claim.a=sleep:999999999", "is no action"),
    ("claim.a=exit:256", "is no action"),
    ("claim.a=raise:SystemExit", "is no action"),
    ("claim.a=raise:os.system", "is no action"),
    ("claim.a=kill;nth=0", "is no modifier"),
    ("claim.a=kill;nth=x", "is no modifier"),
    ("claim.a=kill;p=2", "is no modifier"),
    ("claim.a=kill;file:relative", "is no modifier"),
    ("claim.a=kill;often", "is no modifier"),
    ("claim.a=kill,claim.a=stop", "twice"),
]


@pytest.fixture(autouse=True)
def inert() -> Iterator[None]:
    yield
    failpoints.install("")


def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from umt_durable import failpoints\n{source}"],
        env={**os.environ, **environment},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def used_names() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each point in the package; of an f-string, what follows its variable part."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="point") | ast.Attribute(attr="point"), args=[ast.Constant(value=name)]):
                    yield file.name, str(name)
                case ast.Call(
                    func=ast.Name(id="point") | ast.Attribute(attr="point"),
                    args=[ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(tail))])],
                ):
                    yield file.name, f"*{tail}"


def given_names() -> set[str]:
    """Return what is named to code that reaches its points for others: `lost=` a point, `at=` and `commit` a prefix."""
    found: set[str] = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="commit"), args=[_, ast.Constant(value=str(name)), *_]):
                    found |= {f"{name}.commit.{end}" for end in "bar"}
                case ast.Call(func=ast.Attribute(attr="_do" | "_ask"), args=[_, ast.Constant(value=str(name))]):
                    found |= {name} if name.endswith(".r") else {f"{name}.{end}" for end in "bar"}
                case ast.keyword(arg="lost", value=ast.Constant(value=str(name))):
                    found.add(name)
                case ast.keyword(arg="at", value=ast.Constant(value=str(name))):
                    found |= {f"{name}.{end}" for end in "bar"}
                case ast.Assign(
                    targets=[ast.Name(id="at")],
                    value=ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))),
                ):
                    found |= {f"{name}.{end}" for name in (one, other) for end in "bar"}
                case ast.arg(arg="lost"):
                    found.add("step.commit.r")  # the default of `Attempt.commit`
    return found


def test_every_point_in_the_package_is_declared() -> None:
    declared = [*failpoints.NAMES, *(re.sub(r"^[^.]+", "*", name) for name in failpoints.NAMES), "*.b", "*.a", "*.r"]

    assert [use for use in used_names() if use[1] not in declared] == []
    assert given_names() - set(failpoints.NAMES) == set()


def test_every_declared_point_is_in_the_package() -> None:
    placed = {name for _, name in used_names()} | given_names()

    assert [name for name in failpoints.NAMES if name not in placed] == []


def test_the_declared_names_are_distinct_and_follow_one_form() -> None:
    assert len(set(failpoints.NAMES)) == len(failpoints.NAMES)
    assert all(re.fullmatch(r"[a-z]+(\.[a-z_]+)*(\.[abr])?", name) for name in failpoints.NAMES)


def test_a_point_is_an_empty_function_without_the_variable() -> None:
    done = run("print(failpoints.point is failpoints._inert, failpoints.point('not even declared'))")

    assert done.stdout.split() == ["True", "None"]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_would_not_act_as_meant_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        failpoints.parse(text)


def test_an_undeclared_name_in_the_variable_is_refused_at_import() -> None:
    done = run("", UMT_DURABLE_FAILPOINTS="step.nowhere=kill")

    assert done.returncode == 1
    assert "'step.nowhere' is not a declared fail point" in done.stderr


def test_reaching_an_undeclared_point_raises_while_any_is_active() -> None:
    failpoints.install("claim.a=sleep:0")

    with pytest.raises(ConfigurationError, match="not a declared"):
        failpoints.point("step.nowhere")


def test_kill_ends_the_process_at_the_point() -> None:
    done = run(
        "failpoints.point('claim.b'); failpoints.point('claim.a'); print('after')",
        UMT_DURABLE_FAILPOINTS="claim.a=kill",
    )

    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_exit_leaves_without_clean_up() -> None:
    source = "import atexit; atexit.register(print, 'cleaned'); failpoints.point('claim.a')"

    done = run(source, UMT_DURABLE_FAILPOINTS="claim.a=exit:7")

    assert (done.returncode, done.stdout) == (7, "")


def test_stop_freezes_the_process_until_it_is_continued() -> None:
    source = "from umt_durable import failpoints; failpoints.point('claim.a'); print('went on', flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, "UMT_DURABLE_FAILPOINTS": "claim.a=stop"},
        cwd=PACKAGE.parent,
        stdout=subprocess.PIPE,
        text=True,
    )

    _, status = os.waitpid(child.pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    output, _ = child.communicate(timeout=60)

    assert stopped
    assert output == "went on\n"


@pytest.mark.parametrize("name", failpoints.RAISABLE)
def test_raise_raises_each_type_of_the_list(name: str) -> None:
    failpoints.install(f"step.commit.r=raise:{name}")

    with pytest.raises(Exception, match=re.escape("fail point step.commit.r")) as caught:
        failpoints.point("step.commit.r")

    assert type(caught.value).__name__ == name


def test_nth_acts_at_that_hit_only() -> None:
    failpoints.install("claim.a=raise:RuntimeError;nth=2")
    failpoints.point("claim.a")

    with pytest.raises(RuntimeError):
        failpoints.point("claim.a")
    failpoints.point("claim.a")


def test_a_seeded_probability_acts_at_the_same_hits_each_time() -> None:
    def hits() -> list[int]:
        failpoints.install("claim.a=raise:RuntimeError;p=0.5;seed=7")
        acted = []
        for hit in range(40):
            try:
                failpoints.point("claim.a")
            except RuntimeError:
                acted.append(hit)
        return acted

    first, second = hits(), hits()

    assert first == second
    assert 0 < len(first) < 40


def test_a_file_lets_one_process_act_and_its_successor_go_on(tmp_path: Path) -> None:
    once = tmp_path / "once"
    variable = f"claim.a=kill;file:{once},claim.b=sleep:0"

    first = run("failpoints.point('claim.a')", UMT_DURABLE_FAILPOINTS=variable)
    second = run("failpoints.point('claim.a'); print('went on')", UMT_DURABLE_FAILPOINTS=variable)

    assert first.returncode == -signal.SIGKILL
    assert second.stdout == "went on\n"


def test_the_log_holds_each_reached_name_once_for_each_process(tmp_path: Path) -> None:
    log = tmp_path / "reached"
    source = (
        "import os; names = ['claim.b', 'claim.a', 'claim.b']; [failpoints.point(name) for name in names]\n"
        "child = os.fork()\n"
        "failpoints.point('claim.b')\n"
        "child and os.waitpid(child, 0)"
    )

    done = run(source, UMT_DURABLE_FAILPOINTS_LOG=str(log))

    assert done.returncode == 0, done.stderr
    assert log.read_text().split() == ["claim.b", "claim.a", "claim.b"]
