"""Every error has a class, a page, and a place that raises it; none of them stands alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvattn
from kvattn import errors as E
from kvattn.errors import catalogue, references, related, syntax
from kvattn.errors.catalogue_kinds import UnknownRecordError
from kvattn.errors.raises import raise_sites
from kvattn.errors.record import Record, identity

ROOT = Path(kvattn.__file__).parent.parent
RECORDS = {record.code: record for record in catalogue.records()}
BY_CLASS = {record.exception: record for record in catalogue.records()}

# Exceptions that the package raises without a page: no mistake of a caller comes with them.
UNRECORDED = {
    ("kvattn/testing/", "AssertionError"): "a test that fails",
    ("kvattn/testing/", "ValueError"): "a case that contradicts itself",
    ("kvattn/bench/", ""): "shown in a table in place of a speed",
    ("kvattn/site/", ""): "an answer of the server, or a broken build",
    ("kvattn/commands/", "Exit"): "an exit code",
    ("kvattn/commands/", "BadParameter"): "a usage error, which Typer explains",
}
# Names that stand for a class, or for a function that makes an error.
INDIRECT = {"kind", "renamed", "_block_error"}


def test_classes_pages_and_places_belong_together() -> None:
    assert catalogue.faults() == []


def test_every_record_is_complete() -> None:
    for code, record in RECORDS.items():
        empty = [
            name
            for name, value in record.to_dict().items()
            if not value and name not in ("guard", "arguments")
        ]
        assert empty == [], code
        assert record.example is not None
        assert record.project == "kvattn" and record.version == kvattn.__version__
        assert record.id == identity("kvattn", record.exception, record.message)


Use = references.Reference


class Orphan:
    """Stands for an error class; a real one would stay among the subclasses."""

    code = "KV999"


class Double:
    """Another one with the same code."""

    code = "KV999"


PAGE = dict.fromkeys(catalogue.FIELDS, "text")
USE = Use("tests.Orphan", (), next(iter(RECORDS.values())).sites[0])


@pytest.mark.parametrize(
    ("classes", "pages", "places", "fault"),
    [
        ([Orphan], {"KV999": PAGE}, {Orphan: (USE,)}, None),
        ([Orphan], {"KV999": PAGE}, {Orphan: ()}, "KV999 Orphan is raised nowhere"),
        ([Orphan], {"KV999": PAGE}, {}, "KV999 Orphan is raised nowhere"),
        ([Orphan], {}, {Orphan: (USE,)}, "KV999 Orphan has no page"),
        ([], {"KV999": PAGE}, {}, "the page KV999 belongs to no class"),
        (
            [Orphan],
            {"KV999": {name: "" for name in catalogue.FIELDS if name != "after"}},
            {Orphan: (USE,)},
            "the page KV999 lacks after",
        ),
        (
            [Orphan, Double],
            {"KV999": PAGE},
            {Orphan: (USE,), Double: (USE,)},
            "KV999 is the code of Orphan and of Double",
        ),
    ],
)
def test_each_fault_is_found(
    classes: list[Any], pages: Any, places: Any, fault: str | None
) -> None:
    assert list(catalogue._faults(classes, pages, places)) == ([] if fault is None else [fault])


def test_codes_and_ids_are_unique_across_all_projects() -> None:
    known = catalogue.everything()
    for names in ([record.code for record in known], [record.id for record in known]):
        assert sorted(set(names)) == sorted(names)
    assert {record.project for record in known} > {"kvattn"}


def excused(file: str, exception: str) -> bool:
    return any(file.startswith(start) and name in ("", exception) for start, name in UNRECORDED)


def test_every_raise_has_a_record() -> None:
    """Nothing is raised but classes with a page of their own, and what UNRECORDED excuses."""
    without = []
    for source in references.package_sources():
        for site in raise_sites(source):
            known = site.exception in BY_CLASS or site.exception in INDIRECT
            if not known and not excused(source.name, site.exception):
                without.append(f"{source.name}:{site.site.line} raises {site.exception}")
    assert without == []


def test_nothing_is_excused_in_vain() -> None:
    raised = {
        (source.name, site.exception)
        for source in references.package_sources()
        for site in raise_sites(source)
    }
    for start, name in UNRECORDED:
        assert any(file.startswith(start) and name in ("", each) for file, each in raised), start


@pytest.mark.parametrize("code", RECORDS)
def test_the_named_line_makes_the_error(code: str) -> None:
    record = RECORDS[code]
    for site in record.sites:
        lines = (ROOT / site.file).read_text(encoding="utf-8").split("\n")
        line = lines[site.line - 1]
        assert re.search(rf"\b{record.exception}\b|\braise kind\(", line), (
            f"{site.file}:{site.line}"
        )
        assert site.source == "\n".join(lines[site.first - 1 : site.first - 1 + syntax.AROUND])
        assert site.first <= site.line < site.first + syntax.AROUND
        function = site.function.rpartition(".")[2]
        assert any(f"def {function}(" in above for above in lines[: site.line])


def places(record: Record) -> list[tuple[str, str, str]]:
    return [(Path(site.file).name, site.function, site.guard) for site in record.sites]


def test_indirect_places_are_found() -> None:
    """A class handed to a helper, chosen by a condition, returned by a function, in a method."""
    assert places(BY_CLASS["AttentionChunkError"]) == [
        ("option_checks.py", "normalise", ""),
        ("option_checks.py", "_integer", "number is None or number < 0"),
    ]
    different = "tensor.device != device"
    kind = "tensor.device.type {} device.type"
    assert places(BY_CLASS["DeviceMismatchError"]) == [
        ("checks.py", "same_device", f"{different} and {kind.format('!=')}")
    ]
    assert places(BY_CLASS["DeviceIndexMismatchError"]) == [
        ("checks.py", "same_device", f"{different} and {kind.format('==')}")
    ]
    assert ("option_checks.py", "_block_error", "") in places(BY_CLASS["BlockSparseError"])
    assert places(BY_CLASS["LayerIndexError"]) == [
        ("cache.py", "PagedKVCache._layer", "found is None or not 0 <= found < self.num_layers")
    ]


def test_classes_of_one_name_are_told_apart() -> None:
    """By what the file imports; names are unique in kvattn.errors, not in the package."""
    files = {code: {Path(site.file).name for site in RECORDS[code].sites} for code in RECORDS}
    assert files["KV185"] == {"reference.py"}
    assert files["KV605"] == {"translate.py"}


SNIPPET = '''
from kvattn import errors as E
from kvattn.errors.kinds import HeadDimError as Renamed

def check(x: E.QueryRankError, kind: type[E.HeadRatioError]) -> E.CacheRankError:
    """Raises E.SoftcapError."""
    try:
        pass
    except E.SinksError as error:
        if isinstance(error, E.RelBiasError):
            raise
    table = {"k": E.LeftpadTensorError}
    made = x and E.DropoutError(f"x[{x}]", 1, 2)
    for name in ("q", "k"):
        raise E.FlagError(name, 1, 2)
    for name, other in (("v", 1), ("w", 2)):
        helper(other, name, E.WindowSizeError)
    raise Renamed("q" if x else "k", 1, 2)

def helper(x, name, kind):
    if x:
        raise kind(name, x, 3)
'''


def test_only_values_count_as_places() -> None:
    source = syntax.parse(SNIPPET, "kvattn/snippet.py")
    names = {record.exception for record in RECORDS.values()} | {"Renamed"}
    found = [
        (use.name.removeprefix("kvattn.errors."), use.site.line, use.site.guard, use.arguments)
        for use in references.references(source, names)
    ]
    assert found == [
        ("LeftpadTensorError", 12, "", ()),
        ("DropoutError", 13, "x", ("x",)),
        ("FlagError", 15, "", ("q", "k")),
        ("WindowSizeError", 17, "", ("v", "w")),
        ("WindowSizeError", 22, "x", ()),
        ("kinds.HeadDimError", 18, "", ("q", "k")),
    ]


def test_the_template_is_the_message() -> None:
    """What varies stands in braces, the rest comes as the template says."""
    with pytest.raises(E.HeadRatioError) as caught:
        kvattn.flash_attn_func(torch.zeros(1, 2, 3, 8), *torch.zeros(2, 1, 2, 2, 8))
    parts = re.split(r"\{\w+\}", BY_CLASS["HeadRatioError"].message)
    assert re.fullmatch("(.+)".join(map(re.escape, parts)), str(caught.value))
    assert len(parts) == 5


def test_an_error_names_the_command_that_explains_it() -> None:
    for kind in catalogue.kinds():
        message = str(kind("q", 1, 2))
        assert message.startswith(f"[{kind.code}] q: ")
        assert message.endswith(f" Explain: kvattn errors show {kind.code}")


def test_arguments_are_those_of_the_call() -> None:
    assert RECORDS["KV101"].arguments == ("q", "qv")
    assert set(RECORDS["KV149"].arguments) == {"q_descale", "k_descale", "v_descale"}
    assert RECORDS["KV201"].arguments == ("new",)
    assert RECORDS["KV121"].arguments == ("cache_seqlens",)  # as its class says


def test_related_errors_are_others_that_exist() -> None:
    ids = {record.id: record for record in RECORDS.values()}
    for record in RECORDS.values():
        assert len(record.related) == len(set(record.related)) <= related.MOST
        assert record.id not in record.related
        assert set(record.related) <= set(ids)
    codes = [ids[key].code for key in RECORDS["KV127"].related]
    assert codes[0] == "KV128"  # left padding over the length, left padding below 0


def test_likeness_goes_by_argument_function_and_words() -> None:
    subjects = [
        related.Subject("argument", ["page_table"], ["a.py:f"], "no page there"),
        related.Subject("same argument", ["page_table"], ["b.py:g"], "wrong dtype"),
        related.Subject("same function", ["sinks"], ["a.py:f"], "one per head"),
        related.Subject("same words", ["q"], ["c.py:h"], "not one page"),
        related.Subject("nothing", ["v"], ["d.py:i"], "other matter"),
    ]
    found = related.related(subjects)
    assert found["argument"] == ("same argument", "same function", "same words")
    assert found["nothing"] == ()


@pytest.mark.parametrize("key", ["KV121", "kv121", " KV121\n", RECORDS["KV121"].id])
def test_a_record_by_code_or_id(key: str) -> None:
    assert catalogue.record(key) is RECORDS["KV121"]


def test_records_of_other_projects_are_found_too() -> None:
    other = catalogue.everything()[-1]
    assert other.project != "kvattn"
    assert catalogue.record(other.code) is other is catalogue.record(other.id)


@pytest.mark.parametrize(
    ("key", "near"), [("KV1211", "KV121"), ("FA4-1", "FA4-"), ("nonsense", "a code like KV101")]
)
def test_an_unknown_record_names_what_comes_near(key: str, near: str) -> None:
    with pytest.raises(UnknownRecordError) as caught:
        catalogue.record(key)
    assert near in str(caught.value.allowed) and key in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_needs_the_standard_library_only() -> None:
    code = """
import json, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [Without if f is PathFinder else f for f in sys.meta_path]
from kvattn.errors import catalogue
print(json.dumps(len(catalogue.everything())))
"""
    optional = ("typer", "rich", "jinja2", "pygments", "transformers", "triton")
    ran = subprocess.run(
        [sys.executable, "-c", code, *optional], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == len(catalogue.everything())


def test_before_python_3_11_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(E.cli_kinds.CommandPackageError, match="tomli"):
        catalogue._toml()


def test_exceptions_are_classes_that_can_be_caught() -> None:
    for kind in catalogue.kinds():
        assert issubclass(kind, E.KvattnError)
        own = [base for base in kind.__mro__ if base.__module__ == "builtins"]
        assert len(own) > 3, f"{kind.__name__} is an Exception only"
