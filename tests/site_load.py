"""Requests at a steady rate against a server of the site: how many come back, and how soon.

    kvattn errors serve --port 8617 &
    python tests/site_load.py http://127.0.0.1:8617 --rate 200 --seconds 20

Requests leave on time however long earlier ones take, so that a stall shows in all that wait.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import quote, urlsplit


def requests(base: str) -> Iterator[str]:
    """An endless mixture of pages, records, lists and searches, some of which find nothing."""
    connection = HTTPConnection(urlsplit(base).netloc, timeout=20)
    connection.request("GET", "/api/errors?limit=500")
    errors = json.loads(connection.getresponse().read())["errors"]
    connection.close()
    draw = random.Random(0)
    for number in itertools.count():
        each = draw.choice(errors)
        words = draw.choices(f"{each['title']} {each['message']}".split(), k=3)
        word = quote(" ".join([*words, str(number)] if number % 10 == 0 else words))
        yield from (
            *(f"/errors/{each['id']}", f"/errors/{each['code']}", f"/api/errors/{each['id']}"),
            *("/", "/assets/style.css", "/assets/site.js", "/api/errors"),
            *(f"/?q={word}", f"/api/errors?q={word}", f"/api/errors?project={each['project']}"),
        )


class Connection:
    """One connection that is kept open."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> tuple[int, int]:
        """Status and length of the body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        await reader.readexactly(length)
        return int(head.split()[1]), length


async def measure(base: str, rate: int, seconds: int, connections: int) -> dict[str, float]:
    """Milliseconds from when a request was due until its answer was read."""
    parts = urlsplit(base)
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(Connection(str(parts.hostname), parts.port or 80))
    times: list[float] = []
    statuses: Counter[int] = Counter()

    async def one(path: str, due: float) -> None:
        connection = await free.get()
        status, _ = await connection.get(path)
        free.put_nowait(connection)
        statuses[status] += 1
        times.append(1000 * (time.perf_counter() - due))

    paths = requests(base)
    start = time.perf_counter()
    tasks = []
    for number in range(rate * seconds):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(next(paths), due)))
    await asyncio.gather(*tasks)
    took = time.perf_counter() - start
    times.sort()
    share = {f"p{part}": times[int(len(times) * part / 100)] for part in (50, 90, 99)}
    answers = {f"status {status}": float(count) for status, count in statuses.items()}
    return {"requests/s": len(times) / took, **share, "max": times[-1], **answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("base", help="such as http://127.0.0.1:8617")
    parser.add_argument("--rate", type=int, default=200, help="requests per second (200)")
    parser.add_argument("--seconds", type=int, default=20, help="how long, at most 120 (20)")
    parser.add_argument("--connections", type=int, default=16, help="kept open (16)")
    options = parser.parse_args()
    found = asyncio.run(
        measure(options.base, options.rate, min(options.seconds, 120), options.connections)
    )
    for name, value in found.items():
        unit = " ms" if name == "max" or name[0] == "p" else ""
        print(f"{name:12}{value:10.1f}{unit}")


if __name__ == "__main__":
    main()
