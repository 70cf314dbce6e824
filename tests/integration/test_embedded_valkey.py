"""The embedded Valkey on its own: starts, stops, crashes, its loopback port, and that Celery takes its URLs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import guard
from tests.support.embedded import kill, valkey, zombie
from umt_durable.embedded import ValkeyServer
from umt_durable.errors import EmbeddedError

# Celery's own use of its Redis client.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

Make = Callable[..., ValkeyServer]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def make(home: Path) -> Iterator[Make]:
    made: list[ValkeyServer] = []

    def build(*, durable: bool = True, tcp: bool = False, place: Path = home) -> ValkeyServer:
        server = ValkeyServer(place, durable=durable, tcp=tcp)
        guard.watch(server.home.path)
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop()


def send(server: ValkeyServer, *texts: str) -> None:
    """Put messages into a queue as Celery's broker connection does."""
    with Celery(broker=server.url, set_as_current=False).connection_for_write() as connection:
        queue = connection.SimpleQueue("messages")
        for text in texts:
            queue.put({"text": text})
        queue.close()


def receive(server: ValkeyServer) -> list[str]:
    """Take all messages out of the queue."""
    with Celery(broker=server.url, set_as_current=False).connection_for_read() as connection:
        queue = connection.SimpleQueue("messages")
        texts: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = queue.get_nowait()
                message.ack()
                texts.append(message.payload["text"])
        queue.close()
        return texts


@pytest.mark.parametrize("tcp", [False, True])
def test_celery_takes_its_urls_for_broker_and_result_backend(make: Make, tcp: bool) -> None:
    server = make(tcp=tcp)
    server.start()
    app = Celery(broker=server.url, backend=server.result_url, set_as_current=False)
    task_id = str(uuid.uuid4())

    send(server, "one", "two")
    app.backend.store_result(task_id, {"value": 42}, "SUCCESS")

    assert receive(server) == ["one", "two"]
    assert app.AsyncResult(task_id).get(timeout=10) == {"value": 42}
    app.backend.client.close()


def test_emptying_the_broker_keeps_results(make: Make) -> None:
    server = make()
    server.start()
    app = Celery(broker=server.url, backend=server.result_url, set_as_current=False)
    app.backend.store_result("some-task", 42, "SUCCESS")
    send(server, "one")

    valkey(server.url, "FLUSHDB")

    assert receive(server) == []
    assert app.AsyncResult("some-task").get(timeout=10) == 42
    app.backend.client.close()


def test_it_listens_on_its_socket_alone_unless_asked(make: Make) -> None:
    server = make()

    server.start()

    assert server.port is None
    assert valkey(server.url, "CONFIG", "GET", "port") == ["port", "0"]


def test_a_second_start_finds_the_server_that_runs(make: Make) -> None:
    first, second = make(), make()
    first.start()

    second.start()

    assert second.pid == first.pid is not None
    assert first.log.read_text().count("Ready to accept connections") == 1


@pytest.mark.parametrize("tcp", [False, True])
def test_a_durable_one_starts_again_with_its_messages_and_url(make: Make, tcp: bool) -> None:
    server = make(tcp=tcp)
    server.start()
    send(server, "one")
    url = server.url

    assert server.stop() is True
    assert server.stop() is False
    server.start()

    assert server.url == url
    assert receive(server) == ["one"]


def test_one_that_is_not_durable_starts_empty(make: Make) -> None:
    server = make(durable=False)
    server.start()
    send(server, "one")

    server.stop()
    server.start()

    assert receive(server) == []


def test_a_killed_one_comes_back_with_every_message(make: Make) -> None:
    server = make()
    server.start()
    send(server, *map(str, range(100)))

    kill(server.pid)
    server.start()

    assert receive(server) == [str(number) for number in range(100)]


def test_an_immediate_stop_loses_no_message(make: Make) -> None:
    server = make()
    server.start()
    send(server, "one")

    server.stop("immediate")
    server.start()

    assert receive(server) == ["one"]


def test_a_pid_file_that_names_another_process_is_left_over(make: Make) -> None:
    server = make()
    server.start()
    send(server, "one")
    dead = zombie()
    foreigner = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    for pid in (dead.pid, foreigner.pid):
        kill(server.pid)
        (server.data / "valkey.pid").write_text(f"{pid}\n")
        assert server.pid is None
        server.start()

    assert receive(server) == ["one"]
    assert foreigner.poll() is None
    foreigner.communicate(b"")
    dead.wait()


def test_several_starters_make_one_server(make: Make) -> None:
    server = make()
    program = (
        "import sys; from pathlib import Path; from umt_durable.embedded import ValkeyServer;"
        " ValkeyServer(Path(sys.argv[1])).start()"
    )
    argv = [sys.executable, "-c", program, str(server.home.path)]

    starters = [subprocess.Popen(argv, env=guard.clean_environment()) for _ in range(4)]

    assert [starter.wait(timeout=60) for starter in starters] == [0, 0, 0, 0]
    assert server.log.read_text().count("Ready to accept connections") == 1


def test_a_failed_start_names_the_log_and_shows_its_end(make: Make) -> None:
    server = make()
    server.start()
    send(server, "one")
    server.stop()
    for part in (server.data / "appendonlydir").glob("*.manifest"):
        part.write_text("no manifest at all\n")

    with pytest.raises(EmbeddedError) as failure:
        server.start()

    assert str(server.log) in str(failure.value)
    assert "manifest" in str(failure.value)


def test_a_server_without_durability_is_not_taken_for_a_durable_one(make: Make) -> None:
    make(durable=False).start()

    with pytest.raises(EmbeddedError, match=r"without durability.*down"):
        make(durable=True).start()


def test_a_server_without_a_port_is_not_taken_for_one_with(make: Make) -> None:
    make(tcp=False).start()

    with pytest.raises(EmbeddedError, match=r"without a loopback port.*down"):
        make(tcp=True).start()


def test_loopback_asks_for_the_password_of_the_home(make: Make) -> None:
    server = make(tcp=True)
    server.start()

    with redis.Redis.from_url(server.url) as let_in:
        assert let_in.ping()
    for wrong in (None, "guessed"):
        with (
            redis.Redis(port=server.port or 0, password=wrong, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises((redis.AuthenticationError, redis.ResponseError)),
        ):
            stranger.ping()


def test_a_process_that_finds_a_server_with_a_password_knows_it(make: Make) -> None:
    make(tcp=True).start()
    other = make(tcp=False)

    other.start()
    send(other, "one")

    assert other.url.startswith("redis+socket://:")
    assert receive(other) == ["one"]


def test_a_long_path_of_the_home_does_not_matter_to_the_socket(make: Make, tmp_path: Path) -> None:
    server = make(place=tmp_path / ("long-" * 40) / "a home with spaces, {braces} & %41?")

    server.start()
    send(server, "one")

    assert receive(server) == ["one"]


def test_wipe_needs_a_stopped_server_and_leaves_an_empty_one(make: Make) -> None:
    server = make()
    server.start()
    send(server, "one")

    with pytest.raises(EmbeddedError, match="stop it"):
        server.wipe()
    server.stop()
    server.wipe()
    server.start()

    assert receive(server) == []
