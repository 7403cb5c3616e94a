"""What a scan finds in a file: attention calls and raised errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvattn.errors.raises import Raise
from kvattn.peers import PEERS, Verdict
from kvattn.scan.rewrite import Rewrite

BACKENDS = tuple(peer.name for peer in PEERS if peer.packages != ("torch",))


@dataclass(frozen=True)
class CallSite:
    """A call of a function of FlashAttention's kind.

    Attributes:
        file, line: where.
        function: the enclosing function.
        libraries: where the called function may come from, the likeliest first.
        called: its own name there.
        arguments: as written, by that library's names.
        verdicts: what other libraries would refuse or alter.
        rewrite: what to write for kvattn.
    """

    file: str
    line: int
    function: str
    libraries: tuple[str, ...]
    called: str
    arguments: dict[str, str]
    verdicts: tuple[Verdict, ...]
    rewrite: Rewrite

    def refused_by(self, backend: str | None = None) -> bool:
        """Whether a backend, or any, certainly refuses or alters the call."""
        return any(v.certain and backend in (None, v.peer) for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            **{name: getattr(self, name) for name in ("file", "line", "function", "called")},
            "libraries": list(self.libraries),
            "arguments": self.arguments,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "rewrite": self.rewrite.to_dict(),
        }


@dataclass(frozen=True)
class RaisedError:
    """An error, and all the places that raise it.

    Attributes:
        id: as everywhere in kvattn: project, exception, message template.
        exception: name of its type.
        message: template.
        known: code of its page in kvattn's catalogue, "" if it has none.
        related: ids of the errors most like it.
        sites: where it is raised.
    """

    id: str
    exception: str
    message: str
    known: str
    related: tuple[str, ...]
    sites: tuple[Raise, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        sites = [{**asdict(each.site), "parameters": list(each.parameters)} for each in self.sites]
        names = ("id", "exception", "message", "known")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "related": list(self.related), "sites": sites}
