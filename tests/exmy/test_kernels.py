"""Selection of the kernels: automatic, by override, and without a compiler."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import exmy
import numpy as np
import pytest

from tests.support.threads import assert_releases_interpreter


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_levels():
    assert exmy.kernels.levels()[0] == "reference"
    assert exmy.kernels.level() == exmy.kernels.levels()[-1]
    for name in exmy.kernels.levels():
        with exmy.kernels.use(name):
            assert exmy.kernels.level() == name
    assert exmy.kernels.level() == exmy.kernels.levels()[-1]


def test_a_wrong_level():
    with pytest.raises(exmy.KernelError, match="'sse9' cannot run here; expected one of reference"):
        with exmy.kernels.use("sse9"):
            pass


def test_the_environment_chooses():
    result = run("import exmy; print(exmy.kernels.level())", EXMY_KERNELS="reference")
    assert (result.returncode, result.stdout.strip()) == (0, "reference")
    result = run("import exmy", EXMY_KERNELS="sse9")
    assert result.returncode == 1
    assert "exmy.errors.KernelError: kernel level 'sse9' cannot run here" in result.stderr


MISSING = """
import sys, warnings
sys.modules["exmy._kernels"] = None
import exmy, numpy as np
assert exmy.kernels.levels() == ("reference",)
x = np.linspace(-3, 3, 1 << 17, dtype=np.float32)
exmy.encode(x[:1000], "e4m3")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    packed = exmy.encode_packed(x, "e3m2")
    assert exmy.decode_packed(packed, "e3m2", x.size).tobytes() == exmy.round(x, "e3m2").tobytes()
print([w.category.__name__ for w in seen], "compiler" in str(seen[0].message), seen[0].filename)
"""


def test_without_the_extension_there_is_one_warning():
    result = run(MISSING)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == "['SlowPathWarning'] True <string>"


def test_numpy_is_all_that_is_needed():
    code = """
import sys
sys.modules["ml_dtypes"] = None
import exmy, numpy as np
assert exmy.round(np.float32(1.1), "e4m3") == 1.125
try:
    exmy.decode(np.zeros(3, np.uint8), "e4m3", "bfloat16")
except exmy.DtypeError as error:
    print(error)
assert not [m for m in sys.modules if m.split(".")[0] == "tstore"]
"""
    result = run(code)
    assert (result.returncode, result.stdout.strip()) == (
        0,
        "dtype 'bfloat16' needs the package ml_dtypes: pip install ml_dtypes",
    )


def test_the_interpreter_runs_on_while_kernels_work(native):
    x, layout = np.ones(1 << 22, np.float32), exmy.Format("e3m2").layout
    assert_releases_interpreter(
        lambda: exmy.kernels.squared_errors(exmy.elements.Kind.FLOAT32, layout, x, 64)  # 0.1 s or more
    )


def test_the_extension_checks_what_could_touch_other_memory(native):
    from exmy import _kernels

    x, out = np.ones(300, np.float32), np.zeros(300, np.uint8)
    level = exmy.kernels.levels().index(native) - 1
    assert _kernels.encode(level, 2, 4, 3, 7, False, False, x, out) == (0, 0)
    for arguments in [
        (9, 2, 4, 3, 7, False, False, x, out),
        (level, 4, 4, 3, 7, False, False, x, out),
        (level, 2, 9, 3, 7, False, False, x, out),
        (level, 2, 4, 2**31 - 1, 7, False, False, x, out),
        (level, 2, 4, 3, 513, False, False, x, out),
        (level, 2, 4, 3, 7, False, False, x, out[:-1].copy()),
        (level, 2, 4, 3, 7, True, False, x, out[:-1].copy()),
    ]:
        with pytest.raises(ValueError, match=r"level|kind|format|bytes"):
            _kernels.encode(*arguments)
    with pytest.raises(ValueError, match="bytes"):
        _kernels.decode(level, 2, 4, 3, 7, True, out[:-1].copy(), x)
    with pytest.raises(ValueError, match="bytes"):
        _kernels.round(level, 2, 4, 3, 7, False, x[:-1].copy(), x)
    extreme = 2**31 - 1
    for arguments in [
        (level, 6, 301, out, out),
        (level, 6, -1, out, out),
        *((level, bits, 300, out, out) for bits in (17, 1, 0, -1, extreme, -extreme - 1)),
    ]:
        with pytest.raises(ValueError, match=r"bytes|format|count"):
            _kernels.pack(*arguments)
        with pytest.raises(ValueError, match=r"bytes|format|count"):
            _kernels.unpack(*arguments)
    sums = np.zeros(65)
    with pytest.raises(ValueError, match="1 to 64"):
        _kernels.squared_errors(level, 2, 4, 3, 7, False, x, sums)
    with pytest.raises(ValueError, match="format"):
        _kernels.squared_errors(level, 2, 4, 3, 500, False, x, sums[:20])
    scales, factors, tries, best = np.ones(2, np.float32), np.ones(3), np.full(2, 3), np.zeros(2, np.int64)
    right = (level, 2, 4, 3, 7, False, True, 150, scales, factors, tries, x, best, np.zeros(2))
    assert _kernels.least(*right) is None
    for at, wrong in [
        (7, 151),
        (8, scales[:1]),
        (9, factors[:2]),
        (10, tries[:1]),
        (12, best[:1]),
        (13, sums[:1]),
    ]:
        arguments = list(right)
        arguments[at] = wrong
        with pytest.raises(ValueError, match=r"runs|bytes|tries"):
            _kernels.least(*arguments)
    codes, huge = np.zeros(8, np.uint8), 2**63 - 1
    for length, inner, first in [(huge, 1, huge), (1, huge, huge), (2**62, 1, huge), (8, 1, -1), (-8, 1, 0)]:
        with pytest.raises(ValueError, match="scales"):
            _kernels.decode_groups(
                level, 2, 4, 3, 7, False, length, inner, first, scales[:1], codes, x[:8].copy(), False
            )
    target = np.zeros(6 * 50, np.float32)
    assert _kernels.columns(4, 6, 50, 0, 50, x, target) is None
    for arguments in [
        (3, 6, 50, 0, 50),
        (4, 7, 50, 0, 50),
        (4, 6, 50, 1, 50),
        (4, 6, 50, -1, 50),
        (4, 6, 50, 0, 51),
    ]:
        with pytest.raises(ValueError, match=r"columns|bytes"):
            _kernels.columns(*arguments, x, target)


def test_another_thread_changes_the_arguments_of_a_search(native):
    """The counts were checked before: the search must not read factors beyond the last, whatever they are now."""
    from exmy import _kernels

    level, count = exmy.kernels.levels().index(native) - 1, 1 << 16
    runs, scales, factors = np.ones(16 * count, np.float32), np.ones(count, np.float32), np.ones(3)
    tries, best, error = np.full(count, 3), np.zeros(count, np.int64), np.zeros(count)
    arguments = (level, 2, 4, 3, 7, False, False, 16, scales, factors, tries, runs, best, error)
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(_kernels.least, *arguments)
        while not search.done():
            tries[:] = best[:] = 1 << 40
        with suppress(ValueError):  # the change came before the check
            search.result()


def test_the_extension_checks_the_sizes_of_statistics_and_stochastic_rounding(native):
    from exmy import _kernels

    x, out, scales = np.ones(300, np.float32), np.zeros(300, np.uint8), np.ones(1, np.float32)
    level = exmy.kernels.levels().index(native) - 1
    assert _kernels.stochastic(level, 2, 4, 3, 7, 1, 0, 0, False, x, out) == (0, 0)
    for target, short in [(0, out[:-1].copy()), (1, out), (2, x[:-1].copy()), (7, out[:-1].copy())]:
        with pytest.raises(ValueError, match="bytes"):
            _kernels.stochastic(level, 2, 4, 3, 7, 1, 0, target, False, x, short)
    packed = np.zeros(304, np.uint8)
    _kernels.stochastic_groups(level, 2, 4, 3, 7, False, 300, 1, 0, 1, scales, x, packed)
    for length, inner, first, given in [
        (299, 1, 0, packed),
        (300, 1, 1, packed),
        (300, 1, 0, out),
        (0, 1, 0, packed),
    ]:
        with pytest.raises(ValueError, match="bytes"):
            _kernels.stochastic_groups(level, 2, 4, 3, 7, False, length, inner, first, 1, scales, x, given)
    with pytest.raises(ValueError, match="bytes"):
        _kernels.exponents(level, 2, x, np.zeros(2099, np.int64))
    with pytest.raises(ValueError, match="bytes"):
        _kernels.compare(level, 2, x, x[:-1].copy())
    with pytest.raises(ValueError, match="kind"):
        _kernels.compare(level, 4, x, x)
