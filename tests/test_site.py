"""The pages and the JSON about errors: valid, whole, linked, safe, and written with care."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree.ElementTree import Element

import jsonschema
import pytest
from openapi_spec_validator import validate as validate_openapi
from site_tools import AWKWARD, NASTY, everything, parsed, record, rendered, texts

from kvattn.errors.cli_kinds import ExportTargetError
from kvattn.errors.record import Record
from kvattn.site import code, search
from kvattn.site.collection import Collection, Query
from kvattn.site.export import MANIFEST, Files, export, render
from kvattn.site.openapi import openapi
from kvattn.site.pages import Pages
from kvattn.site.schema import json_schema


@pytest.fixture(scope="module", params=["all", "awkward"])
def collection(request: pytest.FixtureRequest) -> Collection:
    return everything() if request.param == "all" else AWKWARD


@pytest.fixture(scope="module")
def files(collection: Collection) -> Files:
    return rendered(collection)


@pytest.fixture(scope="module")
def sample(collection: Collection) -> list[Record]:
    """Records whose pages are read closely: every fifth, and the longest."""
    return [*collection.records[::5], max(collection.records, key=lambda each: len(each.sites))]


@pytest.fixture(scope="module")
def trees(files: Files, sample: list[Record]) -> dict[str, Element]:
    """The index and pages of the sample, parsed by the rules of HTML without mercy."""
    paths = {f"errors/{key}.html" for each in sample for key in (each.id, each.code)}
    return {path: parsed(files[path]) for path in ("index.html", *sorted(paths))}


def test_one_page_and_one_json_an_error(collection: Collection, files: Files) -> None:
    assert {path for path in files if path.startswith("errors/")} == {
        f"errors/{key}.html" for each in collection.records for key in (each.id, each.code)
    }
    assert {path for path in files if path.startswith("api/")} == {
        "api/errors.json",
        *(f"api/errors/{each.id}.json" for each in collection.records),
    }


def test_every_link_leads_somewhere(files: Files) -> None:
    """Within the export: nothing is fetched from elsewhere."""
    pages = {path: text.decode() for path, text in files.items() if path.endswith(".html")}
    ids = {path: set(re.findall(r' id="([^"]*)"', text)) for path, text in pages.items()}
    links = 0
    for path, text in pages.items():
        for link in addresses(text):
            parts = urlsplit(link)
            assert not parts.scheme
            assert not parts.netloc
            target = path if not parts.path else resolved(path, unquote(parts.path))
            assert target in files, f"{path} links to {link}"
            if parts.fragment:
                assert parts.fragment in ids[target], f"{path} links to {link}"
            links += 1
    assert links > 8 * len(pages)
    assert not re.search(rb"url\(|@import|https?:", files["assets/style.css"])
    assert not re.search(rb"https?:|import\(|fetch\(", files["assets/site.js"])


def addresses(page: str) -> list[str]:
    found = re.findall(r' (?:href|src|action)="([^"]*)"| content="0; url=([^"]*)"', page)
    return [unescape(link or moved) for link, moved in found]


def resolved(page: str, link: str) -> str:
    parts = page.split("/")[:-1]
    for part in link.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def test_links_to_filters_name_what_is_there(collection: Collection, files: Files) -> None:
    values = {name: {value for value, _ in found} for name, found in collection.facets.items()}
    seen: Counter[str] = Counter()
    for path in (path for path in files if path.endswith(".html")):
        for link in addresses(files[path].decode()):
            for name, (value,) in parse_qs(urlsplit(link).query).items():
                assert value in values[name]
                seen[name] += 1
    assert set(seen) == {"project", "exception", "argument"}


def test_pages_run_no_code_but_their_script(trees: dict[str, Element]) -> None:
    for path, tree in trees.items():
        for element in tree.iter():
            assert not [name for name in element.attrib if str(name).startswith("on")], path
            assert "style" not in element.attrib
            assert element.tag != "style"
            if element.tag == "script":
                assert not texts(element)
                assert str(element.get("src")).removeprefix("../") == "assets/site.js"


def test_pages_can_be_read_without_eyes(trees: dict[str, Element]) -> None:
    """Headings in order, one main, names for fields, figures and regions, no id twice."""
    for path, tree in trees.items():
        elements = list(tree.iter())
        ids = [element.get("id") for element in elements if element.get("id")]
        assert len(ids) == len(set(ids)), path
        levels = [int(e.tag[1]) for e in elements if re.fullmatch("h[1-6]", str(e.tag))]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), path
        assert len([e for e in elements if e.tag == "main"]) == 1
        labelled = {e.get("for") for e in elements if e.tag == "label"}
        for element in elements:
            if element.tag in ("input", "select"):
                assert element.get("id") in labelled
            if element.tag == "img":
                assert element.get("alt") is not None
            if element.get("role") == "group" or element.tag in ("nav", "aside"):
                assert element.get("aria-label")
            for name in ("aria-labelledby", "aria-describedby"):
                assert element.get(name) is None or element.get(name) in ids
        html = next(e for e in elements if e.tag == "html")
        assert html.get("lang") == "en"


def test_a_page_says_what_the_record_says(sample: list[Record], trees: dict[str, Element]) -> None:
    for each in sample:
        tree = trees[f"errors/{each.id}.html"]
        said = " ".join(texts(tree).split())
        parts = [each.title, each.message, each.trigger, each.version, *each.situations]
        if "`" not in each.meaning:
            parts += [each.meaning, *each.solutions]
        for part in parts:
            assert " ".join(part.replace("`", "").split()) in said.replace("`", "")
        programs = [texts(e).rstrip() for e in tree.iter("pre")]
        wanted = [each.guard] if each.guard else []
        wanted += [each.example.before, each.example.after] if each.example else []
        for program in filter(None, wanted):
            assert code_of(program) in programs, each.code
        assert tree.find("head/title") is not None
        assert each.code in texts(tree.find("head/title"))


def code_of(program: str) -> str:
    """A program as its block on a page holds it."""
    return unescape(re.sub("<[^>]*>", "", "\n".join(code.code_lines(program)))).rstrip()


def test_source_lines_keep_their_numbers(sample: list[Record], trees: dict[str, Element]) -> None:
    shown = 0
    for each in sample:
        sources = [site for site in each.sites if site.source]
        tree = trees[f"errors/{each.id}.html"]
        blocks = [pre for pre in tree.iter("pre") if pre.get("class") == "numbered"]
        assert len(blocks) == len(sources)
        for site, block in zip(sources, blocks, strict=True):
            lines = site.source.expandtabs(4).rstrip().split("\n")
            spans = [e for e in block.iter("span") if e.get("data-n")]
            assert [int(e.attrib["data-n"]) - site.first for e in spans] == list(range(len(lines)))
            assert [texts(e).strip() for e in spans] == [line.strip() for line in lines]
            marked = [int(e.attrib["data-n"]) for e in spans if "marked" in e.attrib["class"]]
            assert marked == [site.line]
            shown += 1
    assert shown


def test_json_is_as_its_schema_says(collection: Collection, files: Files) -> None:
    schema = json.loads(files["schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for each in collection.records:
        value = json.loads(files[f"api/errors/{each.id}.json"])
        check.validate(value)
        assert value["message"] == each.message
        assert tuple(value["solutions"]) == each.solutions
    found = json.loads(files["api/errors.json"])
    found_schema = {**schema, "$ref": "#/$defs/Found"}
    jsonschema.Draft202012Validator(found_schema).validate(found)
    assert [x["id"] for x in found["errors"]] == [x.id for x in collection.records]


@pytest.mark.parametrize(
    "change",
    [{"id": "xyz"}, {"code": 3}, {"extra": 1}, {"sites": [{"file": "a"}]}, {"example": {}}],
    ids=str,
)
def test_the_schema_refuses_other_json(change: dict[str, Any]) -> None:
    value = json.loads(json.dumps(everything().records[0].to_dict()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value | change, json_schema())


def test_every_property_is_described() -> None:
    for name in ("Record", "Site", "Example"):
        for field, schema in json_schema()["$defs"][name]["properties"].items():
            assert name == "Example" or schema["description"], f"{name}.{field}"


@pytest.mark.parametrize("files_only", [False, True])
def test_openapi_description(files_only: bool) -> None:
    description = openapi(files_only)
    validate_openapi(description)
    paths = {path.replace("{key}", everything().records[0].id) for path in description["paths"]}
    if files_only:
        assert {path.lstrip("/") for path in paths} <= set(rendered(everything()))


# Search


def found(text: str, **filters: str) -> list[str]:
    return [each.code for each in everything().search(Query(text, **filters))]


@pytest.mark.parametrize("written", ["KV121", "kv121", " KV121\n"])
def test_a_code_is_found_first(written: str) -> None:
    assert found(written)[0] == "KV121"
    assert found(everything().records[3].id) == [everything().records[3].code]


def test_every_word_has_to_be_there() -> None:
    both = found("PAGE table rotary")
    assert set(both) == set(found("page")) & set(found("table")) & set(found("rotary"))
    assert len(found("")) == len(everything().records)
    assert found("page qwertyuiop") == []


def test_titles_count_more_than_explanations() -> None:
    records = (
        record("A-1", "something", meaning="It is about a zebra."),
        record("A-2", "the zebra", meaning=""),
        record("A-3", "nothing", title="A zebra"),
        record("A-4", "none"),
        record("zebra", "code"),
    )
    order = [each.code for each in search.ranked("zebra", map(search.Entry.of, records))]
    assert order == ["zebra", "A-3", "A-2", "A-1"]


TRACEBACK = """Traceback (most recent call last):
  File "/srv/app/venv/lib/python3.12/site-packages/sglang/srt/layers/attention/backend.py", line 812
    raise NotImplementedError(
NotImplementedError: {message}
"""


@pytest.mark.parametrize(
    "message",
    [
        "FA4 does not support updating KV cache in-place.",
        "FA4 path does not support rotary embedding.",
    ],
)
def test_a_traceback_leads_to_its_error(message: str) -> None:
    codes = found(TRACEBACK.format(message=message.replace("support ", "support\n  ")))
    assert everything().get(codes[0]).message == message  # type: ignore[union-attr]


def test_a_message_of_kvattn_leads_to_its_error() -> None:
    for each in everything().records:
        if each.project == "kvattn":
            text = re.sub(r"\{\w+\}", "(2, 3)", each.message)
            assert found(f"E   kvattn.errors.{each.exception}: {text}")[0] == each.code


def test_filters() -> None:
    for name, values in everything().facets.items():
        for value, count in values:
            codes = found("", **{name: value})
            assert len(codes) == count
            for each in map(everything().get, codes):
                assert each is not None
                assert value in (each.project, each.exception, *each.arguments)
    assert found("KV121", project="sglang-fa4") == []
    assert found("", project="kvattn", exception="AppendOverflowError") == ["KV121"]


def test_related_errors_are_there() -> None:
    for each in everything().records:
        assert len(everything().related(each)) == len(each.related), each.code


def test_ids_and_codes_are_unique() -> None:
    twin = record("KV1", "a")
    with pytest.raises(ValueError, match="kv1"):
        Collection((twin, record("kv1", "b")))


# Text and code


def test_code_in_prose() -> None:
    text = (
        "Cast cache_seqlens: lengths.cumsum(0).to(torch.int32), `a < b`, e.g. <b>. See q[:, None]."
    )
    codes = re.findall("<code>(.*?)</code>", code.inline(text))
    wanted = ["cache_seqlens", "lengths.cumsum(0).to(torch.int32)", "a &lt; b", "q[:, None]"]
    assert codes == wanted
    assert "&lt;b&gt;" in code.inline(text)
    assert code.prose("one\ntwo\n\nthree") == "<p>one\ntwo</p>\n<p>three</p>"


def test_what_varies_in_a_message_is_set_apart() -> None:
    assert code.template("got {x} & {}") == "got <var>{x}</var> &amp; <var>{}</var>"


def test_lines_of_code_stand_alone() -> None:
    lines = code.code_lines('    x = """a\n    <b>"""\n    return x\n')
    assert len(lines) == 3
    assert all(line.count("<span") == line.count("</span>") for line in lines)
    assert lines[0].startswith("<span")  # the common indentation is gone
    assert "&lt;b&gt;" in lines[1]


def test_changed_lines() -> None:
    assert code.changed("a\nb\n\nc\n", "a\nB\n\nc") == {1}
    assert code.changed("a\nb", "x\na\nb") == set()
    assert code.changed("x\na\nb", "a\nb") == {0}


# Export


def tree_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


SMALL = Collection(AWKWARD.records[:2])
LARGER = Collection(AWKWARD.records[1:5])


def test_export_writes_all_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "site"
    written = export(target, SMALL)
    assert tree_of(target) == render(SMALL)
    assert written == sorted(render(SMALL))
    assert [path.name for path in target.parent.iterdir()] == ["site"]
    assert target.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777


def test_export_goes_into_an_empty_directory_and_over_an_earlier_one(tmp_path: Path) -> None:
    export(tmp_path, SMALL)
    (tmp_path / "CNAME").write_text("mine")
    (tmp_path / "errors" / "mine.html").write_text("mine")
    export(tmp_path, LARGER)
    mine = {"CNAME": b"mine", "errors/mine.html": b"mine"}
    assert tree_of(tmp_path) == render(LARGER) | mine
    export(tmp_path, LARGER)
    assert tree_of(tmp_path) == render(LARGER) | mine


def test_export_keeps_files_that_were_changed_since(tmp_path: Path) -> None:
    """One that it would overwrite is refused; one that is merely left over stays."""
    export(tmp_path, LARGER)
    gone = f"errors/{LARGER.records[-1].id}.html"
    (tmp_path / gone).write_text("edited")
    export(tmp_path, SMALL)
    assert (tmp_path / gone).read_text() == "edited"
    before = tree_of(tmp_path)
    with pytest.raises(ExportTargetError, match=rf"KV506.*{gone}"):
        export(tmp_path, LARGER)
    assert tree_of(tmp_path) == before
    (tmp_path / "index.html").write_text("edited")
    with pytest.raises(ExportTargetError, match=r"KV506.*index\.html"):
        export(tmp_path, SMALL)


def file_in_the_way(target: Path) -> None:
    (target / "assets").mkdir(parents=True)
    (target / "assets" / "style.css").write_text("mine")


def folder_in_the_way(target: Path) -> None:
    (target / "index.html").mkdir(parents=True)


def file_for_a_folder(target: Path) -> None:
    target.mkdir()
    (target / "errors").write_text("mine")


def link_out_of_the_directory(target: Path) -> None:
    target.mkdir()
    (target.parent / "elsewhere").mkdir()
    (target / "api").symlink_to(target.parent / "elsewhere")


def link_for_a_page(target: Path) -> None:
    target.mkdir()
    (target.parent / "secret").write_text("mine")
    (target / "index.html").symlink_to(target.parent / "secret")


def foreign_manifest(target: Path) -> None:
    target.mkdir()
    (target / MANIFEST).write_text("[1]")


def a_file(target: Path) -> None:
    target.write_text("mine")


def below_a_file(target: Path) -> None:
    target.parent.rmdir()
    target.parent.write_text("mine")


@pytest.mark.parametrize(
    "prepare",
    [
        file_in_the_way,
        folder_in_the_way,
        file_for_a_folder,
        link_out_of_the_directory,
        link_for_a_page,
        foreign_manifest,
        a_file,
        below_a_file,
    ],
)
def test_export_refuses_and_leaves_everything(tmp_path: Path, prepare: Any) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    prepare(parent / "site")
    before = tree_of(tmp_path)
    with pytest.raises(ExportTargetError) as caught:
        export(parent / "site", SMALL)
    assert caught.value.code == "KV506"
    assert str(parent) in str(caught.value.got)
    assert tree_of(tmp_path) == before


def test_a_page_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Pages, record: Record) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr(Pages, "error", fail)
    with pytest.raises(RuntimeError, match="no page"):
        export(tmp_path / "site", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path, SMALL)
    before = tree_of(tmp_path)
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == "index.html":
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportTargetError, match="No space left"):
        export(tmp_path, LARGER)
    assert tree_of(tmp_path) == before


def test_hostile_text_is_text() -> None:
    pages = Pages(AWKWARD, files=False)
    for text in NASTY:
        tree = parsed(b"".join(pages.index(Query(q=text, project=text))))
        box = next(e for e in tree.iter("input"))
        assert box.get("value") == text
        chosen = [e.get("value") for e in tree.iter("option") if e.get("selected") is not None]
        assert chosen == [text]
        scripts = [e.get("src") for e in tree.iter("script")]
        assert scripts == ["assets/site.js"]
