"""One host process of a measurement: reads calls as lines of JSON from standard input, and replies likewise."""

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
        request = json.loads(line)
        try:
            if "contender" in request:
                subject = CONTENDERS[request["contender"]](share, request["place"], request["server"])
                reply: dict[str, Any] = {}
            else:
                assert subject is not None
                reply = _do(share, subject, **request)
        except Exception:
            reply = {"error": traceback.format_exc().strip().splitlines()[-1]}
        gc.collect()  # so that no contender is measured with another's garbage
        print(json.dumps(reply), flush=True)


def _do(share: Share, subject: Contender, do: str, run: str) -> dict[str, Any]:
    before = machine.reset_peak()
    if do == "save":
        subject.save(run)
        ended = time.monotonic()
        return {"requests": subject.requests, "peak": machine.peak() - before, "ended": ended}
    restored = subject.restore(run)
    ended = time.monotonic()
    peak = machine.peak() - before - sum(array.nbytes for array in restored.values())
    if not all(np.array_equal(restored[name], share.arrays[name]) for name in share.names):
        raise ValueError("the restored values differ")
    return {"requests": subject.requests, "peak": peak, "ended": ended}


if __name__ == "__main__":
    main()
