"""Text and code as safe HTML: highlighted lines with numbers, inline code, message templates."""

from __future__ import annotations

import re
import textwrap
from difflib import SequenceMatcher
from functools import cache

from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_LEXER = PythonLexer(stripnl=False, ensurenl=False)
_FORMATTER = HtmlFormatter(nowrap=True)  # a span never goes past the end of its line

_ARGUMENTS = r"\((?:[^()\n]|\([^()\n]*\))*\)"
_INDEX = r"\[(?:[^\[\]\n]|\[[^\[\]\n]*\])*\]"
_TAIL = rf"(?:\.[A-Za-z_]\w+|{_ARGUMENTS}|{_INDEX})"
_CODE = re.compile(
    r"`([^`\n]+)`"
    rf"|\b[A-Za-z]\w*_\w+{_TAIL}*"  # cache_seqlens, flash_attn_func(...)
    rf"|\b[A-Za-z]\w*{_TAIL}+"  # q.dtype, out[:, 0], lengths.cumsum(0).to(torch.int32)
)
_HOLE = re.compile(r"\{[^{}]*\}")


@cache
def code_lines(code: str) -> tuple[Markup, ...]:
    """Each line of a program, highlighted; indentation common to all is dropped."""
    text = textwrap.dedent(code.expandtabs(4)).rstrip()
    return tuple(Markup(x) for x in highlight(text, _LEXER, _FORMATTER).rstrip("\n").split("\n"))


def changed(code: str, other: str) -> set[int]:
    """The lines of `code`, counted from 0, that `other` has not got in that place."""
    lines, others = (text.rstrip().split("\n") for text in (code, other))
    kept = SequenceMatcher(a=lines, b=others, autojunk=False).get_matching_blocks()
    same = {line for block in kept for line in range(block.a, block.a + block.size)}
    return set(range(len(lines))) - same - {n for n, line in enumerate(lines) if not line}


def prose(text: str) -> Markup:
    """Paragraphs, which blank lines separate, with inline code."""
    parts = re.split(r"\n\s*\n", text.strip())
    return Markup("\n").join(Markup("<p>{}</p>").format(inline(part)) for part in parts if part)


def inline(text: str) -> Markup:
    """Text of one paragraph; what is code, or stands between backticks, is set as code."""
    return _marked(_CODE, "code", text)


def template(message: str) -> Markup:
    """A message in which what varies, {in braces}, is set apart."""
    return _marked(_HOLE, "var", message)


def _marked(pattern: re.Pattern[str], tag: str, text: str) -> Markup:
    """`text` with an element around each match: around its group if it has one."""
    pieces, at = [], 0
    for match in pattern.finditer(text):
        inner = next(filter(None, match.groups()), match[0])
        pieces += [escape(text[at : match.start()]), Markup(f"<{tag}>{{}}</{tag}>").format(inner)]
        at = match.end()
    return Markup("").join([*pieces, escape(text[at:])])
