"""How often, and for how long, a thread that does nothing but read clocks gets nothing done.

    python -m benchmarks.stalls SECONDS CORE

What such a thread loses by its own processor time is not the operating system's (which would not
count it) nor the program's: the machine below has stopped the core, or slowed it. Prints those
times, in ms.
"""

from __future__ import annotations

import json
import os
import sys
import time

LEAST_S = 0.001


def stalls_ms(seconds: float) -> list[float]:
    found = []
    last_s, end_s = time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        now_s = time.thread_time()
        if now_s - last_s > LEAST_S:
            found.append(round(1e3 * (now_s - last_s), 2))
        last_s = now_s
    return found


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    print(json.dumps(stalls_ms(float(sys.argv[1]))))
