"""Records as HTML pages."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2

import kvattn
from kvattn.errors.record import Record
from kvattn.site import code, search
from kvattn.site.collection import Collection, Query

ASSETS = Path(__file__).parent / "assets"

_ITEMS = b"<!-- items -->"

_SAID = {
    400: "The address cannot be understood.",
    404: "There is nothing here. An error gets a new id when its message is reworded.",
    405: "This can only be read.",
}


def said(status: int) -> str:
    """One sentence about an answer that is none."""
    return _SAID.get(status, "The server failed.")


@dataclass(frozen=True)
class Links:
    """Where the other pages are, seen from one of them.

    Attributes:
        files: whether pages are files of an export; a server needs no endings.
        up: what leads from the page to the index: "", "../" or, from anywhere, "/".
    """

    files: bool
    up: str = ""

    def index(self, **query: str) -> str:
        page = f"{self.up}index.html" if self.files else self.up or "./"
        return f"{page}?{urlencode(query)}" if query else page

    def error(self, record: Record) -> str:
        return f"{self.up}errors/{record.id}{'.html' if self.files else ''}"

    def api(self, record: Record | None = None) -> str:
        below = f"/{record.id}" if record else ""
        return f"{self.up}api/errors{below}{'.json' if self.files else ''}"

    def to(self, path: str) -> str:
        return self.up + path


class Pages:
    """All pages of a collection.

    Args:
        collection: the records.
        files: for an export rather than for the server.
    """

    def __init__(self, collection: Collection, files: bool) -> None:
        self.collection = collection
        self.files = files
        self._templates = _environment()
        item = self._templates.get_template("item.html")
        links = Links(files)
        self._items = {
            record.id: item.render(record=record, at=at, links=links).encode()
            for at, record in enumerate(collection.records)
        }
        self._hidden = {
            id: item.replace(b"<li>", b"<li hidden>", 1) for id, item in self._items.items()
        }

    def index(self, query: Query | None = None) -> list[bytes]:
        """The list of all records, in parts; those that the query does not mean are hidden."""
        query = query or Query()
        found = dict.fromkeys(record.id for record in self.collection.search(query))
        frame = self._render(
            "index.html", "", query=query, count=len(found), facets=self.collection.facets
        )
        head, tail = frame.encode().split(_ITEMS)
        rest = (item for id, item in self._hidden.items() if id not in found)
        return [head, *(self._items[id] for id in found), *rest, tail]

    def error(self, record: Record) -> str:
        """The page of one error."""
        records = self.collection.records
        at = records.index(record)
        values = {
            "related": self.collection.related(record),
            "before": records[at - 1] if at else None,
            "after": records[at + 1] if at + 1 < len(records) else None,
        }
        return self._render("error.html", "../", record=record, **values)

    def moved(self, record: Record) -> str:
        """The page under the code, which sends the reader to the one under the id."""
        return self._render("moved.html", "../", record=record)

    def problem(self, status: int) -> str:
        """The page in place of one that cannot be shown, wherever that would have been."""
        title = HTTPStatus(status).phrase
        values = {"status": status, "title": title, "said": said(status)}
        return self._render("problem.html", "/", **values)

    def _render(self, name: str, up: str, **values: Any) -> str:
        links = Links(self.files, up)
        return self._templates.get_template(name).render(links=links, **values)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvattn.site"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        changed=code.changed,
        code_lines=code.code_lines,
        details=search.details,
        inline=code.inline,
        names=search.names,
        prose=code.prose,
        template=code.template,
    )
    environment.globals["version"] = kvattn.__version__
    return environment
