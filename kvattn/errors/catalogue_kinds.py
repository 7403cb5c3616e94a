"""Mistakes in asking about errors: a page that is not there, a path that cannot be scanned."""

from __future__ import annotations

from kvattn.errors.base import ArgumentValueError


class UnknownRecordError(ArgumentValueError, LookupError):
    """No error has this id or code."""

    code = "KV701"
    problem = "there is no error with this id or code"
    fix = "see `kvattn errors list`, or paste the message into `kvattn errors find`"


class ScanPathError(ArgumentValueError):
    """The path to scan does not exist, or is neither a directory nor a regular file."""

    code = "KV702"
    problem = "the path cannot be scanned"
    fix = "name a Python file or a directory that holds some"
