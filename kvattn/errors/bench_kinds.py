"""Mistakes that only `kvattn bench` can meet: files of results, revisions, pages."""

from __future__ import annotations

from kvattn.errors.base import ArgumentValueError, KvattnError


class ResultsFileError(ArgumentValueError):
    """A file is not what `kvattn bench` wrote, or files do not belong together."""

    code = "KV801"
    problem = "these are no results that can be used here"
    fix = "measure again with `kvattn bench --out FILE`"


class ReportPackageError(KvattnError, ImportError):
    """A package that draws plots or fills the page is not installed."""

    code = "KV802"
    problem = "the report needs a package that is not installed"
    fix = "pip install 'kvattn[bench]'"


class RevisionError(ArgumentValueError):
    """The revision to compare with cannot be checked out or measured."""

    code = "KV803"
    problem = "this revision cannot be measured"
    fix = "name a commit, branch or tag of a checkout of kvattn that git knows"


class ReadmeMarkerError(ArgumentValueError):
    """The file lacks the two lines between which the table goes."""

    code = "KV804"
    problem = "there is no place for the table in this file"
    fix = "put the lines <!-- bench:begin --> and <!-- bench:end --> where the table shall be"


class OutputPathError(KvattnError, OSError):
    """Results, a page or a table cannot be written where they shall go."""

    code = "KV805"
    problem = "this cannot be written"
    fix = "name a file or directory in a place where you may write and that has room"
