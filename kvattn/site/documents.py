"""What the site says, as bytes: JSON answers and descriptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvattn.errors.record import Record
from kvattn.site.schema import SUMMARY


def encoded(value: Any) -> bytes:
    """JSON in UTF-8, spread out for a reader."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


def found(records: Sequence[Record], offset: int, limit: int) -> dict[str, Any]:
    """A part of what a search found."""
    return {
        "total": len(records),
        "offset": offset,
        "limit": limit,
        "errors": [_summary(record) for record in records[offset : offset + limit]],
    }


def problem(status: int, title: str, detail: str) -> dict[str, Any]:
    """What is wrong with a request (RFC 9457)."""
    return {"status": status, "title": title, "detail": detail}


def _summary(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in SUMMARY}
