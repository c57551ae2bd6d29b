"""What one client may send, hold open and claim to be sent to: raw sockets against a server with small limits."""

import json
import socket
from contextlib import contextmanager, suppress

import pytest
from running import run_server, until, wait_idle

from forerun import ConfigError
from forerun.serve.app import ServerOptions
from forerun.serve.options import ConnectionLimits, host_name
from refusals import refused

HEAD = 2048
PATIENT = ConnectionLimits(max_header_bytes=HEAD, header_timeout=60.0, max_connections=6)
HASTY = ConnectionLimits(max_header_bytes=HEAD, header_timeout=0.3, write_timeout=0.5)
BODY = b'{"prompt": "a", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def patient(served):
    with run_server(
        served, ServerOptions(served_model_name="tiny", max_body_bytes=20000, body_timeout=60.0), PATIENT
    ) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(served):
    with run_server(served, ServerOptions(served_model_name="tiny", max_body_bytes=20000), HASTY) as server:
        server.server.config.timeout_keep_alive = 0.5  # uvicorn's own is 5 s
        yield server


@contextmanager
def connection(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as client:
        yield client


def rest(client):
    """All that comes until the server ends the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def dripped(client):
    """What comes to one who goes on sending drops until the server ends the connection."""
    client.settimeout(0.05)
    for _ in range(600):
        try:
            client.sendall(b"x")
            return client.recv(1000)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return b""
    raise AssertionError("the server still waits")


def answer(client):
    """Status and body of the next answer, whose length is told."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(headers[b"content-length"]):
        body += client.recv(65536)
    return int(head.split()[1]), body


def ask(server, *parts):
    with connection(server) as client:
        client.sendall(b"".join(parts))
        return answer(client)


# ------------------------------------------------------------------------------------------------------------- size


def test_a_head_may_be_as_large_as_the_limit(patient):
    for size in (HEAD, HEAD - 1, 200):
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Filler: "
        head += b"x" * (size - len(head) - 4) + b"\r\n\r\n"
        assert len(head) == size
        assert ask(patient, head)[0] == 200
        with connection(patient) as client:  # in pieces, and after another request
            client.sendall(POST + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
            assert answer(client)[0] == 200
            for start in range(0, size, 700):
                client.sendall(head[start : start + 700])
            assert answer(client)[0] == 200


@pytest.mark.parametrize("endless", [
    b"GET /health HTTP/1.1\r\nX-Line: ", b"GET /health HTTP/1.1\r\nX-Name", b"GET /health?",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100, b"\r\n",
], ids=["value", "name", "url", "headers", "nothing"])  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
def test_a_head_without_end_is_refused(patient, endless, first):
    filler = {b"G": b"x", b"\r": b"\r\n"}[endless[:1]]
    if endless.endswith(b"A: b\r\n"):
        filler = b"A: b\r\n"
    with connection(patient) as client:
        if first:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer(client)[0] == 200
        client.sendall(endless)
        sent = 0
        try:
            while sent < 50 * HEAD:
                client.sendall(filler * (500 // len(filler)))
                sent += 500
        except (BrokenPipeError, ConnectionResetError):
            pass
        said = rest(client)
        assert sent < 50 * HEAD or said
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    assert patient.http.get("/health").status_code == 200


def test_a_large_head_is_reported_so(patient):
    with connection(patient) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Line: " + b"x" * (2 * HEAD))
        said = rest(client)
    assert said.startswith(b"HTTP/1.1 431 ")
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == f"the headers are larger than {HEAD} bytes"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("part", [b"0\r\nX-Trailer: ", b"3;extension="], ids=["trailer", "chunk"])
def test_what_surrounds_a_chunked_body_has_the_same_bound(patient, part):
    with connection(patient) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n" + part)
        try:
            for _ in range(50):
                client.sendall(b"x" * HEAD)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert not rest(client).startswith(b"HTTP/1.1 200")


def test_large_bodies_and_trailers_are_read(patient):
    body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "u" * 15000}).encode()
    assert ask(patient, POST, f"Content-Length: {len(body)}\r\n\r\n".encode(), body)[0] == 200
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 100]), body[i : i + 100]) for i in range(0, len(body), 100))
    trailer = b"0\r\nHost: evil.example\r\n\r\n"
    assert ask(patient, POST, b"Transfer-Encoding: chunked\r\n\r\n", chunks, trailer)[0] == 200


# ------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"\r\n"])
@pytest.mark.parametrize("first", [False, True])
def test_a_head_has_its_time(hasty, start, first):
    """The connection ends without anything more from the client: the socket would wait for 30 s."""
    with connection(hasty) as client:
        if first:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer(client)[0] == 200
        client.sendall(start)
        said = rest(client)
        assert said.startswith(b"HTTP/1.1 408 ") if start else said == b""


def test_drops_of_a_head_do_not_extend_it(hasty):
    with connection(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        said = dripped(client)
        assert said == b"" or said.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_is_no_longer_wanted_keeps_no_connection(hasty):
    """It was answered (413), and goes on arriving, drop by drop."""
    with connection(hasty) as client:
        client.sendall(POST + b"Content-Length: 10000000\r\n\r\n")
        assert answer(client)[0] == 413
        assert dripped(client) == b""


@pytest.mark.usefixtures("slow_rounds")
def test_an_answer_may_take_longer_than_a_head(hasty):
    body = b'{"prompt": "a", "max_tokens": 60, "ignore_eos": true, "speculative": {"enabled": false}}'
    with connection(hasty) as client:
        for _ in range(2):  # on one connection
            client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status, result = answer(client)
            assert (status, json.loads(result)["usage"]["completion_tokens"]) == (200, 60)


@pytest.mark.usefixtures("slower_rounds")
@pytest.mark.parametrize("at_once", [True, False])
def test_who_hangs_up_behind_another_request_is_noticed(patient, at_once):
    body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "speculative": {"enabled": false}}'
    with connection(patient) as client:
        behind = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body + behind * at_once)
        until(lambda: patient.engine.streams)
        if not at_once:  # reading had stopped
            client.sendall(behind)
            until(lambda: any(len(each.pipeline) for each in list(patient.server.server_state.connections)))
    wait_idle(patient)


def test_who_takes_no_answer_is_left(hasty):
    """More than the system's buffers hold, and nobody reads: the connection is given up, not kept for ever."""
    with connection(hasty) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1000):
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        here = client.getsockname()
        until(lambda: here not in [other.client for other in list(hasty.server.server_state.connections)])


# ------------------------------------------------------------------------------------------------------------- number


def test_idle_connections_give_way(patient):
    """More unfinished ones than there may be; whoever asks is answered, and the oldest idle one has gone."""
    patient.http.close()
    clients = []
    try:
        for number in range(20):
            client = socket.create_connection(("127.0.0.1", int(patient.url.rpartition(":")[2])), timeout=30)
            clients.append(client)
            client.sendall(b"GET /health HTTP/1.1\r\nX: y" if number % 2 else b"")
            assert ask(patient, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200
            assert len(patient.server.server_state.connections) <= PATIENT.max_connections + 1
        for client in clients[:10]:
            assert rest(client) == b""
    finally:
        for client in clients:
            client.close()


def test_connections_that_are_at_work_do_not(served):
    limits = ConnectionLimits(max_connections=3)
    with run_server(served, ServerOptions(served_model_name="tiny", body_timeout=60.0), limits) as server:
        server.http.close()
        workers = []
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)
            head = POST + f"Content-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n".encode()
            client.sendall(head)
            assert client.recv(1000).startswith(b"HTTP/1.1 100 ")  # its head has been read
            workers.append(client)
        with connection(server) as client:
            said = rest(client)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for client in workers:
            client.sendall(BODY)
            assert answer(client)[0] == 200
            client.close()


def test_the_system_must_allow_so_many(warm):
    code = (
        "import resource; from forerun.serve.run import allow_files; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 900)); allow_files(500); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)); allow_files(1000)"
    )
    ended = warm.run(code=code)
    assert ended.stdout == "(628, 900)\n"
    assert (
        "1000 connections need 1128 open files and this process may have 900: lower --max-connections" in ended.stderr
    )


@pytest.mark.parametrize("wrong", [{"max_header_bytes": 10}, {"header_timeout": 0.0}, {"max_connections": 0}])
def test_limits_that_are_none(wrong):
    refused(ConfigError, rf"{next(iter(wrong))} must be an? \w+ of at least", ConnectionLimits, **wrong)


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost:  LocalHost.:8000\t\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost: 127.0.0.1:\r\n", 200),
        ("GET http://localhost:80/health HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", 200),  # the URL's name counts
        ("GET http://localhost/health?x=http://evil.example HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nhOST: localhost\r\n", 400),
        ("GET /health HTTP/1.1\r\n", 400),
        ("GET /health HTTP/1.0\r\n", 403),
        ("GET /health HTTP/1.0\r\nHost: localhost\r\n", 200),
        ("GET /health HTTP/1.1\r\nHost: localhost:80@evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: evil.example@localhost\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: localhost:evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: localhost evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: localhost%00.evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: [::1]evil.example\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: [::1%evil.example]\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: localhost..\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: \r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\n", 403),
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\nForwarded: host=localhost\r\n", 403),
        ("GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 403),
        ("GET http://localhost@evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 403),
        ("GET http://evil.example?localhost HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("GET http://evil.example/health HTTP/1.0\r\n", 403),
        ("CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("OPTIONS * HTTP/1.1\r\nHost: evil.example\r\n", 403),
    ],
)
def test_the_name_that_a_request_is_sent_to(patient, head, status):
    with connection(patient) as client:
        client.sendall(f"{head}Connection: close\r\n\r\n".encode())
        said = rest(client)
    assert int(said.split()[1]) == status, said
    if status == 403:
        assert b"does not answer to the name" in said


@pytest.mark.parametrize("name", ["", "a b", "http://localhost", "b\xfccher.example", "a@b", "[::1", "fe80::1%eth0"])
def test_a_name_that_no_request_can_have_is_refused(name):
    assert host_name(name) is None
    refused(ConfigError, "is not a host name or an IP address", ServerOptions, allowed_host=[name])
