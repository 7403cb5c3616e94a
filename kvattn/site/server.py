"""The site over HTTP: every answer without a query is made at the start, the others are kept."""

from __future__ import annotations

import gc
import hashlib
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvattn.errors.cli_kinds import ListenAddressError
from kvattn.site.collection import Collection, Query, collect
from kvattn.site.documents import encoded, found, problem
from kvattn.site.openapi import FURTHEST, LIMIT, LONGEST, LONGEST_NAME, MOST, openapi
from kvattn.site.pages import ASSETS, Pages, said
from kvattn.site.schema import json_schema

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

JSON, HTML, PROBLEM = "application/json", "text/html; charset=utf-8", "application/problem+json"

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_SMALL = 800  # bytes that are not worth packing
_GZIP_HEAD, _LAST_BLOCK = b"\x1f\x8b\x08" + bytes(6) + b"\xff", b"\x03\x00"


@dataclass(frozen=True)
class Answer:
    """The body of an answer, plain and packed, and the tag that changes with it."""

    kind: str
    body: bytes
    packed: bytes | None
    tag: str

    @staticmethod
    def of(kind: str, *parts: bytes) -> Answer:
        """Parts that other answers have too are packed once."""
        body = b"".join(parts)
        packed = _gzip(parts) if len(body) > _SMALL else None
        return Answer(kind, body, packed, f'W/"{hashlib.sha256(body).hexdigest()[:20]}"')

    def to(self, request: Request) -> Response:
        """The response: packed where that is accepted, empty where nothing has changed."""
        headers = {**SECURITY, "ETag": self.tag, "Cache-Control": "no-cache"}
        if self.packed:
            headers["Vary"] = "Accept-Encoding"
        if _has(request.headers.get("if-none-match", ""), self.tag):
            return Response(status_code=304, headers=headers)
        body = self.body
        if self.packed and _accepts_gzip(request.headers.get("accept-encoding", "")):
            body = self.packed
            headers["Content-Encoding"] = "gzip"
        return _response(request, 200, body, self.kind, headers)


def _gzip(parts: Sequence[bytes]) -> bytes:
    """One gzip member of blocks that need nothing of each other."""
    body = b"".join(parts)
    sums = struct.pack("<II", zlib.crc32(body), len(body) & 0xFFFFFFFF)
    return b"".join((_GZIP_HEAD, *map(_deflated, parts), _LAST_BLOCK, sums))


@lru_cache(4096)
def _deflated(part: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)


def _response(
    request: Request, status: int, body: bytes, kind: str, headers: dict[str, str]
) -> Response:
    """A response; to HEAD one that only says how long its body would be."""
    headers = {**headers, "Content-Type": kind, "Content-Length": str(len(body))}
    return Response(b"" if request.method == "HEAD" else body, status, headers)


def _has(if_none_match: str, tag: str) -> bool:
    tags = [each.strip().removeprefix("W/") for each in if_none_match.split(",")]
    return "*" in tags or tag.removeprefix("W/") in tags


def _accepts_gzip(accept_encoding: str) -> bool:
    for each in accept_encoding.lower().split(","):
        name, _, weight = each.replace(" ", "").partition(";q=")
        if name in ("gzip", "*"):
            return weight.strip("0.") != "" or not weight
    return False


def application(collection: Collection | None = None) -> Starlette:
    """The site as an ASGI application."""
    site = _Site(collection or collect())
    app = Starlette(
        routes=[
            Route("/", site.index),
            Route("/errors", site.up),
            Route("/errors/", site.up),
            Route("/errors/{key}", site.page),
            Route("/api/errors", site.search),
            Route("/api/errors/{key}", site.record),
            *(Route(path, site.fixed) for path in site.documents),
        ],
        exception_handlers={HTTPException: site.problem, 500: site.problem},
    )
    app.router.redirect_slashes = False  # it would redirect to the host that the request names
    return app


class _Site:
    """Answers to requests."""

    def __init__(self, collection: Collection) -> None:
        pages = Pages(collection, files=False)
        self._pages = pages
        self._collection = collection
        self.documents = {
            "/openapi.json": Answer.of(JSON, encoded(openapi(files=False))),
            "/schema.json": Answer.of(JSON, encoded(json_schema())),
        }
        for asset in ASSETS.iterdir():
            answer = Answer.of(_KINDS[asset.suffix], asset.read_bytes())
            self.documents[f"/assets/{asset.name}"] = answer
        self.documents["/favicon.ico"] = self.documents["/assets/icon.svg"]  # asked for by JSON
        self._pages_by_id = {
            record.id: Answer.of(HTML, pages.error(record).encode())
            for record in collection.records
        }
        self._records_by_id = {
            record.id: Answer.of(JSON, encoded(record.to_dict())) for record in collection.records
        }
        self._index = lru_cache(64)(self._make_index)
        self._found = lru_cache(512)(self._make_found)
        self._index(Query())
        self._found(Query(), 0, LIMIT)
        collection.search(Query("warms the search for likeness up"))

    def _make_index(self, query: Query) -> Answer:
        parts = self._pages.index(query)
        return Answer.of(HTML, *(parts if query != Query() else [b"".join(parts)]))

    def _make_found(self, query: Query, offset: int, limit: int) -> Answer:
        return Answer.of(JSON, encoded(found(self._collection.search(query), offset, limit)))

    async def fixed(self, request: Request) -> Response:
        return self.documents[request.scope["path"]].to(request)

    async def index(self, request: Request) -> Response:
        return self._index(_query(request)).to(request)

    async def up(self, request: Request) -> Response:
        way = "../" if request.scope["path"].endswith("/") else "./"
        return RedirectResponse(way, 308, SECURITY)

    async def page(self, request: Request) -> Response:
        return self._pages_by_id[self._id(request)].to(request)

    async def record(self, request: Request) -> Response:
        return self._records_by_id[self._id(request)].to(request)

    async def search(self, request: Request) -> Response:
        offset = _number(request, "offset", 0, FURTHEST)
        limit = _number(request, "limit", LIMIT, MOST)
        return self._found(_query(request), offset, limit).to(request)

    async def problem(self, request: Request, error: Exception) -> Response:
        """JSON below /api, a page elsewhere."""
        status, detail, headers = 500, "The server failed.", {}
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
        title = HTTPStatus(status).phrase
        if request.scope["path"].startswith("/api/"):
            detail = "" if detail == title else detail
            kind, body = PROBLEM, encoded(problem(status, title, detail or said(status)))
        else:
            kind, body = HTML, self._pages.problem(status).encode()
        return _response(request, status, body, kind, {**headers, **SECURITY})

    def _id(self, request: Request) -> str:
        record = self._collection.get(request.path_params["key"])
        if record is None:
            raise HTTPException(404, "There is no error with this id or code.")
        return record.id


def _query(request: Request) -> Query:
    return Query(
        _text(request, "q", LONGEST),
        *(_text(request, name, LONGEST_NAME) for name in ("project", "exception", "argument")),
    )


def _text(request: Request, name: str, longest: int) -> str:
    value = request.query_params.get(name, "")
    if len(value) > longest:
        raise HTTPException(400, f"{name} may have {longest} characters at most.")
    return value


def _number(request: Request, name: str, default: int, most: int) -> int:
    value = request.query_params.get(name, str(default))
    digits = value.isascii() and value.isdigit()
    if not digits or len(value) > len(str(most)) or int(value) > most:
        raise HTTPException(400, f"{name} must be a whole number from 0 to {most}.")
    return int(value)


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = print,
    collection: Collection | None = None,
) -> None:
    """Serves the site until interrupted.

    Args:
        host: name or address of an interface of this machine.
        port: 0 for any that is free.
        ready: gets the URL once requests can come.
        collection: the records; all by default.

    Raises:
        ListenAddressError: the address is taken, not allowed, or not of this machine.
    """
    with _listening(host, port) as listener:
        running = server(collection)
        gc.freeze()  # what is made at the start stays; looking at it again would cost pauses
        ready(_url(host, listener))
        running.run(sockets=[listener])


def server(collection: Collection | None = None) -> uvicorn.Server:
    """A server of the site, to be run with a socket that listens."""
    config = uvicorn.Config(
        application(collection),
        access_log=False,
        http="h11",
        lifespan="off",
        log_level="warning",
        loop="asyncio",
        server_header=False,
    )
    return uvicorn.Server(config)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = "an address of this machine that nobody listens at"
        raise ListenAddressError("host and port", f"{host} {port}: {reason}", allowed) from error


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/"
