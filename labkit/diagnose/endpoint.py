"""Which server is this, and where does it stream? A few GETs to the address given, to nowhere else.

Redirects are not followed, because they would carry the request and its key to an address that nobody gave.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from labkit.diagnose.dialects import DIALECTS, find_dialect

CONNECT_S = 5.0
LOOK_S = 10.0
MAX_BODY_BYTES = 1_000_000


class ServerError(ConnectionError):
    """The server cannot be measured: what came instead, what it means, what to do."""


@dataclass(frozen=True)
class Endpoint:
    """Where to send and how to speak. ``server`` is what it calls itself, where it does."""

    url: str
    dialect: str
    model: str | None = None
    server: str = ""
    api_key: str | None = field(default=None, repr=False)
    verify: bool = True

    @property
    def base(self) -> str:
        """The address without the dialect's path: where /metrics and the like are."""
        path = find_dialect(self.dialect).path.format(model=self.model or "")
        trimmed = self.url.removesuffix(path)
        return (trimmed if trimmed != self.url else self.url.rsplit("/", 1)[0]).rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Accept": "text/event-stream", "Accept-Encoding": "identity", **key}


def find_endpoint(
    url: str, *, dialect: str = "auto", model: str | None = None, api_key: str | None = None, verify: bool = True
) -> Endpoint:
    """The endpoint behind ``url``: a server's address, its ``/v1``, or the full path of a stream.

    ``dialect`` "auto" asks the server: ``/v1/models``, then TGI's ``/info``, then Triton's ``/v2``.

    Raises ValueError for what is no address, ServerError when nothing there answers as a known server does.
    """
    base, given = _split(url)
    spoken = given if dialect == "auto" else find_dialect(dialect).name
    with _http(base, verify) as http:
        ask = _Asker(http, api_key)
        if spoken is None:
            return _ask_who(ask, base, model, api_key, verify)
        server = ""
        if spoken.startswith("openai") and model is None:
            found = ask.json(f"{base}/v1/models", must=False)
            model, server = _first_model(found), _server_of(found, ask.headers)
    path = DIALECTS[spoken].path
    if "{model}" in path and not model and given is None:
        raise ValueError("Triton names the model in the address: give model=..., or the full path of the stream.")
    whole = url.rstrip("/") if given is not None else base + path.format(model=model)
    return Endpoint(whole, spoken, model, server, api_key, verify)


def without_chat(url: str, endpoint: Endpoint) -> Endpoint | None:
    """The same server asked by /v1/completions; None when the user's address names the path to ask."""
    if endpoint.dialect != "openai-chat" or _split(url)[1] is not None:
        return None
    return replace(
        endpoint, url=endpoint.url.removesuffix("/chat/completions") + "/completions", dialect="openai-completions"
    )


def _split(url: str) -> tuple[str, str | None]:
    """(base, dialect of the path or None). Raises ValueError for what is no address of a server."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the address of a server: give one such as http://127.0.0.1:8000.")
    if parts.username or parts.password:
        raise ValueError("the address carries a user name or a password: give the key by api_key instead.")
    path = parts.path.rstrip("/")
    origin = f"{parts.scheme}://{parts.netloc}"
    for name, each in DIALECTS.items():
        if each.path.count("{") == 0 and path.endswith(each.path):
            return origin + path.removesuffix(each.path), name
    if path.endswith("/generate_stream"):
        return origin + path.split("/v2/models/")[0], "triton"
    if path.endswith("/chat/completions"):  # a provider whose path has no /v1
        return origin + path.removesuffix("/chat/completions"), "openai-chat"
    return origin + path.removesuffix("/v1"), None


def _http(base: str, verify: bool) -> httpx.Client:
    timeout = httpx.Timeout(LOOK_S, connect=CONNECT_S)
    return httpx.Client(timeout=timeout, verify=verify, trust_env=not is_loopback(base), follow_redirects=False)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Asker:
    def __init__(self, http: httpx.Client, api_key: str | None) -> None:
        self._http = http
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.headers: dict[str, str] = {}
        self.status = 0

    def json(self, url: str, *, must: bool = True) -> Any:
        """The JSON there, or None. Raises ServerError when the server is out of reach or wants a key."""
        self.status, self.headers = 0, {}
        try:
            with self._http.stream("GET", url, headers=self._key) as answer:
                self.status, self.headers = answer.status_code, dict(answer.headers)
                body = b""
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        return None
        except httpx.HTTPError as error:
            if must:
                raise unreachable(url, error) from error
            return None
        if self.status in (401, 403) and must:
            raise ServerError(status_sentence(url, self.status, ""))
        if self.status != 200:
            return None
        try:
            return json.loads(body)
        except ValueError:
            return None


def _ask_who(ask: _Asker, base: str, model: str | None, api_key: str | None, verify: bool) -> Endpoint:
    seen = []
    for prefix in ("/v1", ""):
        found = ask.json(f"{base}{prefix}/models")
        seen.append(f"{prefix}/models {ask.status}")
        if _first_model(found):
            server = _server_of(found, ask.headers)
            url = f"{base}{prefix}/chat/completions"
            return Endpoint(url, "openai-chat", model or _first_model(found), server, api_key, verify)
    found = ask.json(f"{base}/info", must=False)
    seen.append(f"/info {ask.status}")
    if isinstance(found, dict) and "model_id" in found:
        return Endpoint(f"{base}/generate_stream", "tgi", model or str(found["model_id"]), "TGI", api_key, verify)
    found = ask.json(f"{base}/v2", must=False)
    seen.append(f"/v2 {ask.status}")
    if isinstance(found, dict) and "extensions" in found:
        if not model:
            raise ValueError(f"{base} is a Triton server: name the model to ask with model=... (--model).")
        return Endpoint(f"{base}/v2/models/{model}/generate_stream", "triton", model, "Triton", api_key, verify)
    raise ServerError(
        f"{base} answers, but not as a known server does ({', '.join(seen)}). Give the full path of the stream, such "
        f"as {base}/v1/chat/completions, and dialect=... (--dialect): {', '.join(DIALECTS)}."
    )


def _first_model(found: Any) -> str | None:
    models = found.get("data") if isinstance(found, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    return str(first["id"]) if isinstance(first, dict) and "id" in first else None


def _server_of(found: Any, headers: dict[str, str]) -> str:
    models = found.get("data") if isinstance(found, dict) else None
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    return str(first.get("owned_by") or headers.get("server") or "")


def unreachable(url: str, error: BaseException) -> ServerError:
    """An httpx exception as a sentence that says what to do."""
    where = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    tls = _cause(error, ssl.SSLError)
    if tls is not None:
        return ServerError(
            f"{where}: TLS failed ({tls}). A server without TLS is asked by http://; a certificate of your own needs "
            "verify=False (--insecure), which then proves nothing about who answers."
        )
    if isinstance(error, httpx.ConnectTimeout):
        plain = ", or does the server speak http:// only?" if where.startswith("https") else "?"
        return ServerError(
            f"{where} does not take a connection within {CONNECT_S:.0f} s: is a firewall between us{plain}"
        )
    if isinstance(error, httpx.ConnectError):
        return ServerError(
            f"{where} cannot be reached ({error}): check the host's name and the port, and that it runs."
        )
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"{where} took the request and then said nothing for too long ({type(error).__name__}).")
    return ServerError(f"{where} broke the connection ({error or type(error).__name__}).")


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    while error is not None:
        if isinstance(error, kind):
            return error
        if "SSL" in str(error) or "CERTIFICATE_VERIFY" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None


_MEANS = {
    400: "it does not take this request",
    401: "it wants a key: give one with api_key=... (--api-key, or the variable LABKIT_API_KEY)",
    403: "this key may not do that",
    404: "there is nothing at this path, or no such model: check the address and model=... (--model)",
    405: "this path takes no POST: it is not the one that streams",
    413: "the prompt is too long for it: ask for a shorter one",
    422: "it does not take this request",
    429: "it limits how many requests it takes: wait, or send less (--budget small)",
    500: "it failed; its own log says why",
    502: "a proxy is there, the server behind it is not",
    503: "it is not ready: starting, full, or stopped",
    504: "a proxy gave up waiting for the server behind it",
}


def status_sentence(url: str, status: int, body: str) -> str:
    """What a status means for who measures, with what the server said."""
    where = urlsplit(url).path or "/"
    if 300 <= status < 400:
        return f"{where} answered {status}: it sends us elsewhere, and labkit only asks the address it was given."
    said = " ".join(body.split())[:300]
    meaning = _MEANS.get(status, "it did not answer as a server of tokens does")
    return f"{where} answered {status}: {meaning}." + (f" It said: {said}" if said else "")
