"""Peak memory of one save or restore, without the caller's arrays, measured in a new process."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

from bench import machine
from bench.save.peers import CONTENDERS
from bench.save.workloads import WORKLOADS, Arrays


def beyond_arrays(contender: str, workload: str, phase: str, folder: Path) -> int:
    """Return the peak resident bytes of a phase ("save" or "restore"), without its inputs and its result.

    A restore reads what a save wrote to `folder`. Raise `RuntimeError` with the last line of the process's
    output.
    """
    command = [sys.executable, "-m", "bench.save.memory", contender, workload, phase, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return int(json.loads(done.stdout.splitlines()[-1]))


def _measure(contender: str, workload: str, phase: str, folder: Path) -> int:
    inputs: Arrays = WORKLOADS[workload].make() if phase == "save" else {}
    subject = CONTENDERS[contender](WORKLOADS[workload])
    gc.collect()
    before = machine.reset_peak()
    result: Arrays = {}
    if phase == "save":
        subject.save(inputs, folder, durable=True)
    else:
        result = subject.restore(folder)
    return max(0, machine.peak() - before - sum(array.nbytes for array in result.values()))


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))))
