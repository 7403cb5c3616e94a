"""The site over HTTP and its two commands: tags, methods, headers, strange paths, hostile texts."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import pytest
from site_tools import AWKWARD, NASTY, Reply, ask, everything, parsed, served, texts
from typer.testing import CliRunner

from kvattn.cli import app
from kvattn.errors.cli_kinds import ListenAddressError
from kvattn.site.server import serve

NEWEST = everything().records[-1]


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with served(everything()) as base:
        yield base


PATHS = {
    "/": "text/html; charset=utf-8",
    "/?q=page": "text/html; charset=utf-8",
    f"/errors/{NEWEST.id}": "text/html; charset=utf-8",
    "/errors/KV121": "text/html; charset=utf-8",
    "/errors/kv121": "text/html; charset=utf-8",
    "/api/errors": "application/json",
    "/api/errors?q=page&limit=2": "application/json",
    f"/api/errors/{NEWEST.id}": "application/json",
    "/api/errors/kv121": "application/json",
    "/schema.json": "application/json",
    "/openapi.json": "application/json",
    "/assets/style.css": "text/css; charset=utf-8",
    "/assets/site.js": "text/javascript; charset=utf-8",
    "/assets/icon.svg": "image/svg+xml",
    "/favicon.ico": "image/svg+xml",
}


def assert_secure(reply: Reply) -> None:
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["X-Frame-Options"] == "DENY"
    assert reply.headers["Server"] is None


@pytest.mark.parametrize("path", PATHS)
def test_answers_their_tags_and_their_packing(site: str, path: str) -> None:
    plain = ask(site, path)
    assert plain.status == 200
    assert plain.headers["Content-Type"] == PATHS[path]
    assert plain.headers["Content-Encoding"] is None
    assert_secure(plain)
    tag = plain.headers["ETag"]

    head = ask(site, path, "HEAD")
    assert head.body == b""
    changing = {"date"}
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in plain.headers.items() if k not in changing
    }

    for value in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
        unchanged = ask(site, path, If_None_Match=value)
        assert (unchanged.status, unchanged.body) == (304, b"")
        assert unchanged.headers["ETag"] == tag
        assert_secure(unchanged)
    assert ask(site, path, If_None_Match='"other", W/"more"').status == 200

    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        packed = ask(site, path, Accept_Encoding=accepted)
        if packed.headers["Content-Encoding"]:
            assert packed.headers["Content-Encoding"] == "gzip"
            assert packed.headers["Vary"] == "Accept-Encoding"
            assert gzip.decompress(packed.body) == plain.body
            assert len(packed.body) < len(plain.body)
        else:
            assert packed.body == plain.body
            assert len(plain.body) < 2000
    for accepted in ("identity", "gzip;q=0", "gzip;q=0.0, br", "xgzip", ""):
        assert ask(site, path, Accept_Encoding=accepted).body == plain.body


@pytest.mark.parametrize("host", ["x/api/y", "x?z#", "a b", "[", ""])
def test_the_name_of_the_host_changes_nothing(site: str, host: str) -> None:
    for path in ("/", "/schema.json", "/errors/KV121", "/errors/none", "/api/errors/none"):
        reply, plain = ask(site, path, Host=host), ask(site, path)
        assert (reply.status, reply.body) == (plain.status, plain.body)
    assert ask(site, "/errors", Host=host).headers["Location"] == "./"


def test_pages_and_json_of_all_errors(site: str) -> None:
    for each in everything().records:
        page, by_code = ask(site, f"/errors/{each.id}"), ask(site, f"/errors/{each.code}")
        assert page.status == 200
        assert page.body == by_code.body
        assert json.loads(ask(site, f"/api/errors/{each.code}").body)["id"] == each.id


def test_links_of_served_pages_lead_somewhere(site: str) -> None:
    """Relative to where each page is, by its id or by its code."""
    seen = {}
    for page in ("/", "/errors/KV121", f"/errors/{NEWEST.id}", "/errors/none", "/a/b/c"):
        for element in parsed(ask(site, page).body).iter():
            for name in ("href", "src", "action"):
                if (link := element.get(name)) and not link.startswith("#"):
                    seen[joined(page, link)] = f"{link} on {page}"
    for path, where in seen.items():
        assert ask(site, path).status == 200, where
    assert len(seen) > len(everything().records)


def joined(page: str, link: str) -> str:
    return urljoin(page, link.partition("#")[0])


def listed(site: str, query: str) -> dict[str, Any]:
    reply = ask(site, f"/api/errors?{query}")
    assert reply.status == 200
    value: dict[str, Any] = json.loads(reply.body)
    return value


def test_search_filters_and_parts_of_the_list(site: str) -> None:
    everywhere = listed(site, "limit=500")
    assert everywhere["total"] == len(everything().records)
    assert listed(site, "")["errors"] == everywhere["errors"][:50]
    assert listed(site, "offset=7&limit=3")["errors"] == everywhere["errors"][7:10]
    assert listed(site, "offset=100000")["errors"] == []
    assert listed(site, "limit=0") == {
        "total": everywhere["total"], "offset": 0, "limit": 0, "errors": [],
    }  # fmt: skip
    assert listed(site, "q=kv121")["errors"][0]["code"] == "KV121"
    one = listed(site, "project=kvattn&argument=cache_seqlens&exception=AppendOverflowError")
    assert [each["code"] for each in one["errors"]] == ["KV121"]
    text = quote("NotImplementedError: FA4 path does not\nsupport rotary embedding.")
    assert listed(site, f"q={text}")["errors"][0]["message"].startswith("FA4 path")


def test_the_page_searches_without_a_script_too(site: str) -> None:
    tree = parsed(ask(site, "/?q=kv121&project=kvattn").body)
    items = next(e for e in tree.iter("ol") if e.get("id") == "results")
    shown = [item for item in items if item.get("hidden") is None]
    assert "KV121" in texts(shown[0])
    assert len(items) == len(everything().records)
    count = next(e for e in tree.iter("p") if e.get("id") == "count")
    assert texts(count).startswith(f"{len(shown)} error")


@pytest.mark.parametrize(
    "query",
    [
        "limit=-1",
        "limit=501",
        "limit=1.0",
        "limit=",
        "limit=x",
        "limit=%00",
        "limit=%D9%A3",
        "limit=99999999999999999999",
        "offset=-1",
        "offset=1000001",
        "q=" + "x" * 8001,
        "project=" + "x" * 201,
    ],
)
def test_parameters_out_of_range(site: str, query: str) -> None:
    reply = ask(site, f"/api/errors?{query}")
    assert reply.status == 400
    assert reply.headers["Content-Type"] == "application/problem+json"
    problem = json.loads(reply.body)
    assert problem["status"] == 400
    assert query.partition("=")[0] in problem["detail"]
    assert_secure(reply)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NEW"])
@pytest.mark.parametrize("path", ["/", "/errors/KV121", "/api/errors", "/api/errors/KV121"])
def test_nothing_can_be_written(site: str, path: str, method: str) -> None:
    reply = ask(site, path, method)
    assert reply.status == 405
    assert {each.strip() for each in reply.headers["Allow"].split(",")} == {"GET", "HEAD"}
    assert_secure(reply)
    if path.startswith("/api/"):
        assert json.loads(reply.body)["status"] == 405
    else:
        assert "405" in texts(parsed(reply.body))


STRANGE = [
    "/nothing",
    "/errors/0000000000000000",
    "/errors/KV999",
    "/api",
    "/api/",
    "/api/errors/",
    "/api/errors/KV999",
    "/api/errors/x/y",
    "/assets/",
    "/assets/none.css",
    "/assets/../server.py",
    "/assets/../../errors/base.py",
    "/assets/%2e%2e/server.py",
    "/assets/..%2fserver.py",
    "/assets/..%5cserver.py",
    "/assets//etc/passwd",
    "//etc/passwd",
    "/errors/../../../etc/passwd",
    "/errors/..%2f..%2f..%2fetc%2fpasswd",
    "/errors/%00",
    "/errors/%ff%fe",
    "/errors/KV121%00.html",
    "/errors/" + "x" * 4000,
    "/.git/config",
    "/kvattn-export.json",
]


@pytest.mark.parametrize("path", STRANGE)
def test_strange_paths(site: str, path: str) -> None:
    reply = ask(site, path)
    assert reply.status == 404
    assert_secure(reply)
    assert "root:" not in reply.text
    if path.startswith("/api/"):
        assert json.loads(reply.body)["status"] == 404
    else:
        assert "404" in texts(parsed(reply.body))
    assert ask(site, path, "HEAD").body == b""


def test_the_folder_of_pages_leads_to_the_index(site: str) -> None:
    for path in ("/errors", "/errors/"):
        reply = ask(site, path)
        assert reply.status == 308
        assert joined(path, reply.headers["Location"]) == "/"


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_hostile_texts_are_texts(site: str, text: str) -> None:
    word = quote(text, safe="")
    reply = ask(site, f"/?q={word}&project={word}&exception={word}&argument={word}")
    tree = parsed(reply.body)
    assert next(tree.iter("input")).get("value") == text
    assert [e.get("src") for e in tree.iter("script")] == ["assets/site.js"]
    assert not [e for e in tree.iter() if any(str(name).startswith("on") for name in e.attrib)]
    for path in (f"/errors/{word}", f"/api/errors/{word}", f"/{word}"):
        missing = ask(site, path)
        assert missing.status == 404
        assert text not in missing.text
    assert listed(site, f"q={word}") == {"total": 0, "offset": 0, "limit": 50, "errors": []}


def test_hostile_records_are_served_as_text() -> None:
    with served(AWKWARD) as base:
        for each in AWKWARD.records:
            page = parsed(ask(base, f"/errors/{each.id}").body)
            assert texts(next(page.iter("h1"))) == each.title
            assert json.loads(ask(base, f"/api/errors/{each.id}").body)["title"] == each.title


# Commands


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app(), ["errors", *arguments])


def test_export_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvattn.site.export.collect", lambda: AWKWARD)
    target = tmp_path / "site"
    said = run("export", str(target))
    assert said.exit_code == 0
    assert (target / "index.html").as_uri() in said.output
    answer = json.loads(run("export", str(target), "--json").stdout)
    assert answer["index"] == (target / "index.html").as_uri()
    assert all((target / path).is_file() for path in answer["files"])


def test_export_to_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    said = run("export", str(tmp_path / "file"), "--json")
    assert said.exit_code == 4
    assert json.loads(said.stdout)["error"]["code"] == "KV506"


@pytest.mark.parametrize("command", [("export", "site"), ("serve",)], ids=" ".join)
def test_a_missing_package_is_named(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("export", "pages", "server"):  # as before their first import
        monkeypatch.delitem(sys.modules, f"kvattn.site.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.chdir(tmp_path)
    said = run(*command)
    assert said.exit_code == 4
    assert "KV505" in said.output
    assert "kvattn[site]" in said.output


def test_an_address_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run("serve", "--port", str(port))
        assert said.exit_code == 4
        assert "KV507" in said.output
        assert str(port) in said.output
    for host, number in (("203.0.113.7", 0), ("x" * 70, 0), ("127.0.0.1", 70000)):
        with pytest.raises(ListenAddressError) as caught:
            serve(host, number, collection=AWKWARD)
        assert host in str(caught.value.got)


def interruptible() -> None:
    """Whatever this process has inherited: shells let what runs behind them ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_serve_prints_its_address_and_ends_with_ctrl_c() -> None:
    command = [sys.executable, "-m", "kvattn.cli", "errors", "serve", "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    ) as ran:
        assert ran.stdout is not None
        line = ran.stdout.readline()
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert address, ran.communicate(timeout=300)
            assert ask(address[0], "/errors/KV121").status == 200
        finally:
            ran.send_signal(signal.SIGINT)
        _, errors = ran.communicate(timeout=300)
    assert errors == ""
    assert ran.returncode == 130
