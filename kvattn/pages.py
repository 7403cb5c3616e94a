"""A pool of page numbers: reference counts, and placement in consecutive runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class PagePool:
    """Hands out the page numbers ``0 .. num_pages - 1`` and counts who holds them.

    Any free page serves any request, so nothing ever needs compacting. Placement only matters for
    speed: pages of one sequence that lie side by side can be read as one slice of the cache.

    Attributes:
        refs: for every page, the number of tables that hold it; 0 means free.
        num_free: how many pages are free.
    """

    def __init__(self, num_pages: int) -> None:
        self.refs = [0] * num_pages
        self.num_free = num_pages
        self._free = (1 << num_pages) - 1  # bit p: page p is free

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Takes ``count`` free pages (the caller has made sure that there are as many).

        The pages right behind page ``after`` come first if they are free; the rest is as few
        consecutive runs as the pool allows.
        """
        pages = self._claim(after + 1, count) if after is not None else []
        while missing := count - len(pages):
            pages += self._claim(self._best_start(missing), missing)
        return pages

    def spread(self, count: int) -> list[int]:
        """Where ``count`` newcomers may start: at equal distances in the widest gap."""
        gap, width = self._widest_gap()
        return [gap + i * (width // count) for i in range(count)]

    def hold(self, pages: Iterable[int]) -> None:
        """Counts one more table that holds each of ``pages``."""
        for page in pages:
            self.refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Counts one table less for each of ``pages``; those that nobody holds are free again."""
        for start, stop in _runs(self._released(pages)):
            self._free |= ((1 << (stop - start)) - 1) << start
            self.num_free += stop - start

    def _released(self, pages: Iterable[int]) -> Iterator[int]:
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                yield page

    def _claim(self, start: int, most: int) -> list[int]:
        """Takes the free run that begins at ``start``, up to ``most`` pages of it."""
        behind = self._free >> start
        free_run = ((behind + 1) & ~behind).bit_length() - 1  # trailing ones
        run = min(free_run, most)
        self._free ^= ((1 << run) - 1) << start
        self.refs[start : start + run] = [1] * run
        self.num_free -= run
        return list(range(start, start + run))

    def _best_start(self, count: int) -> int:
        """The middle of the widest gap, so that the newcomer and its neighbour can both grow."""
        gap, width = self._widest_gap()
        spare = max(width - count, 0)
        return gap + spare // 2 if gap else 0

    def _widest_gap(self) -> tuple[int, int]:
        """First page and size of the longest run of free pages."""
        starts, width = self._free, 1  # bit p of starts: pages p .. p + width - 1 are free
        while longer := starts & (starts >> width):
            starts, width = longer, 2 * width
        step = width
        while step := step // 2:
            if longer := starts & (starts >> step):
                starts, width = longer, width + step
        return (starts & -starts).bit_length() - 1, width


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The consecutive runs ``[start, stop)`` of ``pages``, in order."""
    start = stop = -1
    for page in pages:
        if page != stop:
            if stop > start:
                yield start, stop
            start = page
        stop = page + 1
    if stop > start:
        yield start, stop
