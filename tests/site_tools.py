"""What the tests of the site share: records, a server in a thread, requests, parsed pages."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

import html5lib

from kvattn.errors.record import Example, Record, Site, identity
from kvattn.site.collection import Collection, collect
from kvattn.site.export import Files, render
from kvattn.site.server import server

NASTY = (
    '"><script>alert(1)</script>',
    "' autofocus onfocus='alert(1)",
    "</title></style></textarea><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} ${7*7} `code` &amp; &#60; \\u003c",
    "כותרת עם ‮ סימני כיוון, 長い見出し, e\u0301, 🦀 \u2028 line",
)


def record(code: str, message: str, **fields: object) -> Record:
    """A record with little in it."""
    values: dict[str, object] = {
        "id": identity("other", "ValueError", message),
        "code": code,
        "project": "other",
        "version": "1.0",
        "exception": "ValueError",
        "title": f"Title of {code}",
        "message": message,
        "meaning": "What it means.",
    }
    return Record(**(values | fields))  # type: ignore[arg-type]


def _nasty(number: int, text: str) -> Record:
    """A record with the same hostile text in every place."""
    return record(
        f"BAD-{number}",
        text,
        project=text,
        exception=text,
        title=text,
        meaning=text,
        sites=(Site(text, 3, text, text, 1, f"\n{text}\n\traise {text}\n"), Site("a.py", 0, "")),
        solutions=(text, text),
        example=Example(text, text),
        guard=text,
        trigger=text,
        situations=(text,),
        arguments=(text.replace(" ", "_"),),
        functions=(text,),
    )


AWKWARD = Collection(
    (
        *(_nasty(number, text) for number, text in enumerate(NASTY)),
        record("BARE-1", "x" * 3000),
        record("BARE-2", "", exception="silent", example=Example("", "pass")),
    )
)


@cache
def everything() -> Collection:
    """All real records."""
    return collect()


def rendered(collection: Collection) -> Files:
    """All files of an export, made once."""
    if id(collection) not in _RENDERED:
        _RENDERED[id(collection)] = render(collection)
    return _RENDERED[id(collection)]


_RENDERED: dict[int, Files] = {}


@contextmanager
def served(collection: Collection) -> Iterator[str]:
    """The address of a server that runs until the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = server(collection)
        thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join(timeout=300)


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(base: str, path: str, method: str = "GET", **headers: str) -> Reply:
    """One request, with the path sent as it is written."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=300)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())
    finally:
        connection.close()


def parsed(html: str | bytes) -> Element:
    """The tree of a page; html5lib's ParseError where it is not valid."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    text = html.decode() if isinstance(html, bytes) else html
    tree: Element = parser.parse(text)
    return tree


def texts(element: Element | None) -> str:
    """All text below an element."""
    assert element is not None
    return "".join(element.itertext())
