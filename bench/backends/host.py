"""One host of a measurement: does what it is told on standard input, one line of JSON each, and answers."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np

from bench import machine
from bench.backends.peers import CONTENDERS, Contender, Share

warnings.simplefilter("ignore")


def main() -> None:
    host, hosts, size = map(int, sys.argv[1:])
    share = Share(host, hosts, size)
    subject: Contender | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "contender" in asked:
                subject = CONTENDERS[asked["contender"]](share, asked["place"], asked["server"])
                answer: dict[str, Any] = {}
            else:
                assert subject is not None
                answer = _do(share, subject, **asked)
        except Exception:
            answer = {"error": traceback.format_exc().strip().splitlines()[-1]}
        gc.collect()  # so that none is measured with another's garbage
        print(json.dumps(answer), flush=True)


def _do(share: Share, subject: Contender, do: str, run: str) -> dict[str, Any]:
    before = machine.reset_peak()
    if do == "save":
        subject.save(run)
        ended = time.monotonic()
        return {"requests": subject.requests, "peak": machine.peak() - before, "ended": ended}
    found = subject.restore(run)
    ended = time.monotonic()
    peak = machine.peak() - before - sum(array.nbytes for array in found.values())
    if not all(np.array_equal(found[name], share.arrays[name]) for name in share.names):
        raise ValueError("the restored values differ")
    return {"requests": subject.requests, "peak": peak, "ended": ended}


if __name__ == "__main__":
    main()
