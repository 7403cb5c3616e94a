"""JSON Schema of the records and answers, made from the dataclasses and their docstrings."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from kvattn.errors.record import Example, Record, Site

Json = dict[str, Any]

SUMMARY = ("id", "code", "project", "version", "exception", "title", "message", "arguments")

_SPECIAL: dict[str, Json] = {
    "id": {"pattern": "^[0-9a-f]{16}$"},
    "related": {"items": {"type": "string", "pattern": "^[0-9a-f]{16}$"}},
    "line": {"minimum": 0},
    "first": {"minimum": 0},
}


def json_schema() -> Json:
    """The schema of one record; the other answers are among its definitions."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An error of kvattn or of a related project",
        "$ref": "#/$defs/Record",
        "$defs": schemas("#/$defs/"),
    }


def schemas(base: str) -> dict[str, Json]:
    """The schemas by name; references among them start with `base`."""
    record = _object(Record, base)
    summary = {name: record["properties"][name] for name in SUMMARY}
    count: Json = {"type": "integer", "minimum": 0}
    return {
        "Record": record,
        "Site": _object(Site, base),
        "Example": _object(Example, base),
        "Summary": _closed("What a list shows of a record.", summary),
        "Found": _closed(
            "A part of the records that a search found, the likeliest first.",
            {
                "total": {**count, "description": "How many were found."},
                "offset": {**count, "description": "How many of them come before `errors`."},
                "limit": {**count, "description": "How many `errors` holds at most."},
                "errors": {"type": "array", "items": {"$ref": f"{base}Summary"}},
            },
        ),
        "Problem": _closed(
            "What is wrong with a request (RFC 9457).",
            {
                "status": {"type": "integer", "minimum": 400, "maximum": 599},
                "title": {"type": "string"},
                "detail": {"type": "string"},
            },
        ),
    }


def _object(kind: type, base: str) -> Json:
    """The schema of a dataclass; its docstring says what the fields mean."""
    first, notes = _notes(kind)
    hints = get_type_hints(kind)
    properties: dict[str, Json] = {}
    for field in fields(kind):
        schema = _type(hints[field.name], base) | _SPECIAL.get(field.name, {})
        if field.name in notes:
            schema["description"] = notes[field.name]
        properties[field.name] = schema
    return _closed(first, properties)


def _closed(description: str, properties: dict[str, Json]) -> Json:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type(hint: Any, base: str) -> Json:
    if hint is str:
        return {"type": "string"}
    if hint is int:
        return {"type": "integer"}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type(get_args(hint)[0], base)}
    if isinstance(hint, types.UnionType):
        return {"anyOf": [_type(option, base) for option in get_args(hint)]}
    if hint is types.NoneType:
        return {"type": "null"}
    return {"$ref": f"{base}{hint.__name__}"}


def _notes(kind: type) -> tuple[str, dict[str, str]]:
    """The first line of a docstring, and what its section "Attributes" says of each."""
    text = inspect.getdoc(kind) or ""
    head, _, section = text.partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    notes = {name: " ".join(note.split()).replace("``", "`") for name, note in found}
    return head.strip().split("\n")[0], notes
