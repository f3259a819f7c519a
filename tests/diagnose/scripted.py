"""A server that sends exactly the bytes it is told to, when it is told to: raw sockets, no HTTP library."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def answer(status: int, body: bytes, *, kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}"
    return head.encode() + b"\r\n" + body


@contextlib.contextmanager
def scripted(*scripts: Sequence[float | bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """(address, requests): the n-th connection gets the n-th script, later ones the last; a number is a wait."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    requests: list[bytes] = []
    over = threading.Event()

    def serve(connection: socket.socket, script: Sequence[float | bytes]) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            requests.append(read_request(connection))
            for step in script:
                if isinstance(step, bytes):
                    connection.sendall(step)
                elif over.wait(step):
                    return

    def accept() -> None:
        n = 0
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                script = scripts[min(n, len(scripts) - 1)]
                threading.Thread(target=serve, args=(connection, script), daemon=True).start()
                n += 1

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        over.set()
        listener.close()


def read_request(connection: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        data = connection.recv(65536)
        if not data:
            return found
        found += data
        if found[:1] == b"\x16":  # a TLS greeting: answered in plain text, as plain servers do
            return found
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body
