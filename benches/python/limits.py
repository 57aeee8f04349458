"""What this machine can do at best: `python limits.py` prints a JSON object of GB/s (1e9 bytes), medians.

Copies of pieces of 64 KiB at scattered places with one and with two threads, and one-way traffic over loopback
sockets with one, two and four streams.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

TOTAL, PIECE = 256 << 20, 64 << 10


def together(works: list[Callable[[], None]]) -> float:
    """Seconds until all have ended."""
    team = [threading.Thread(target=work) for work in works]
    start = time.perf_counter()
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return time.perf_counter() - start


def copies(threads: int) -> float:
    source, target = (np.ones((TOTAL // PIECE, PIECE), np.uint8) for _ in range(2))
    places = np.random.default_rng(1).permutation(len(source))

    def part(first: int) -> Callable[[], None]:
        def work() -> None:
            for at in range(first, len(source), threads):
                np.copyto(target[places[at]], source[at])

        return work

    seconds = [together([part(first) for first in range(threads)]) for _ in range(5)]
    return TOTAL / statistics.median(seconds[1:]) / 1e9


def sockets(streams: int) -> float:
    share = TOTAL // streams
    data = memoryview(bytes(share))

    def once() -> float:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(streams)]
        senders = [socket.create_connection(listener.getsockname()) for listener in listeners]
        receivers = [listener.accept()[0] for listener in listeners]

        def receive(end: socket.socket) -> Callable[[], None]:
            room = memoryview(bytearray(share))

            def work() -> None:
                at = 0
                while at < share:
                    at += end.recv_into(room[at:])

            return work

        works = [receive(end) for end in receivers]
        works += [lambda end=end: end.sendall(data) for end in senders]
        seconds = together(works)
        for end in (*listeners, *senders, *receivers):
            end.close()
        return seconds

    return TOTAL / statistics.median([once() for _ in range(4)][1:]) / 1e9


def main() -> None:
    print(
        json.dumps(
            {
                "copies_1_thread": copies(1),
                "copies_2_threads": copies(2),
                "sockets_1_stream": sockets(1),
                "sockets_2_streams": sockets(2),
                "sockets_4_streams": sockets(4),
            }
        )
    )


if __name__ == "__main__":
    main()
