"""The OpenAPI description of the JSON interface, as it is served and as it is exported."""

from __future__ import annotations

import kvattn
from kvattn.site.schema import Json, schemas

LIMIT, MOST, FURTHEST = 50, 500, 1_000_000  # records in an answer: usual, most; passed over
LONGEST, LONGEST_NAME = 8000, 200  # characters of a search text, of a filter


def openapi(files: bool) -> Json:
    """The description (OpenAPI 3.1).

    Args:
        files: of the files of an export rather than of the server.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Errors of kvattn and of related projects",
            "version": kvattn.__version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "." if files else "/"}],
        "paths": _files() if files else _served(),
        "components": {"schemas": schemas("#/components/schemas/")},
    }


def _files() -> Json:
    """What an export holds; a file has no parameters and gives one answer."""
    key = _key("The id of a record.", {"pattern": "^[0-9a-f]{16}$"})
    return {
        "/api/errors.json": _get("listErrors", "All records.", [], _found("Found")),
        "/api/errors/{key}.json": _get("getError", "One record.", [key], _found("Record")),
    }


def _served() -> Json:
    key = _key("The id or the code of a record.", {"minLength": 1})
    found, record, document = (_found(name, headers=True) for name in ("Found", "Record", ""))
    first = {"operationId": "getError", "parameters": {"key": "$response.body#/errors/0/id"}}
    found["200"]["links"] = {"first": first}
    out_of_range = {"400": _problem("A parameter is out of its range.")}
    absent = {"404": _problem("There is no such record.")}
    return {
        "/api/errors": _get(
            "listErrors", "The records that a search finds.", _search(), found | out_of_range
        ),
        "/api/errors/{key}": _get("getError", "One record.", [key], record | absent),
        "/schema.json": _get("getSchema", "The JSON Schema of a record.", [], document),
        "/openapi.json": _get("getDescription", "This description.", [], document),
    }


def _get(name: str, summary: str, parameters: list[Json], responses: Json) -> Json:
    operation = {"operationId": name, "summary": summary, "responses": responses}
    return {"get": {**operation, "parameters": parameters}}


def _found(schema: str, headers: bool = False) -> Json:
    """The answer with a body; with `headers` also the one to If-None-Match."""
    what = _reference(schema) if schema else {"type": "object"}
    answer: Json = {"description": "Found.", "content": {"application/json": {"schema": what}}}
    if not headers:
        return {"200": answer}
    etag = {"ETag": {"description": "For If-None-Match.", "schema": {"type": "string"}}}
    unchanged = {"description": "If-None-Match has the ETag.", "headers": etag}
    return {"200": {**answer, "headers": etag}, "304": unchanged}


def _problem(description: str) -> Json:
    content = {"application/problem+json": {"schema": _reference("Problem")}}
    return {"description": description, "content": content}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _key(description: str, schema: Json) -> Json:
    where = {"name": "key", "in": "path", "required": True}
    return {**where, "description": description, "schema": {"type": "string", **schema}}


def _search() -> list[Json]:
    text, name = ({"type": "string", "maxLength": most} for most in (LONGEST, LONGEST_NAME))
    limit = {"type": "integer", "minimum": 0, "maximum": MOST, "default": LIMIT}
    offset = {"type": "integer", "minimum": 0, "maximum": FURTHEST, "default": 0}
    wanted: list[tuple[str, str, Json]] = [
        ("q", "Words, a message, or a whole traceback.", text),
        ("project", "Only errors of this project.", name),
        ("exception", "Only errors of this type.", name),
        ("argument", "Only errors that concern this argument.", name),
        ("limit", "How many records at most.", limit),
        ("offset", "How many records to pass over.", offset),
    ]
    return [
        {"name": name, "in": "query", "description": description, "schema": schema}
        for name, description, schema in wanted
    ]
