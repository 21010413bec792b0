"""The command line: the table of formats, which the README of exmy shows too."""

import json
import re
import subprocess
import sys
from pathlib import Path

import exmy
import pytest

README = Path(__file__).resolve().parent.parent.parent / "codecs" / "exmy" / "README.md"


def run(*arguments):
    command = [sys.executable, "-W", "error", "-m", "exmy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_the_readme_shows_what_the_command_prints():
    done = run("formats")
    assert (done.returncode, done.stderr) == (0, "")
    table = re.search(r"`python -m exmy formats`.*?\n\n(\| name .*)", README.read_text(), re.S)
    assert table is not None
    assert table[1] == done.stdout


@pytest.mark.parametrize(
    ("choice", "widths"), [((), range(2, 9)), (("--bits", "16"), [16]), (("--bits", "all"), range(2, 17))]
)
def test_json_holds_every_format_exactly(choice, widths):
    expected = [
        {
            "name": f.name,
            "bits": f.bits,
            "bias": f.bias,
            "largest": f.max,
            "smallest_normal": f.smallest_normal,
            "smallest_subnormal": f.smallest_subnormal,
            "values": len(set(f.values().tolist())),
        }
        for bits in widths
        for f in exmy.formats(bits)
    ]
    assert json.loads(run("formats", "--json", *choice).stdout) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["formats", "--bits", "17"], "no formats of '17' bits; expected an integer from 2 to 16, or all"),
        (["formats", "--bits", "x"], "no formats of 'x' bits"),
        (["formats", "--what"], "unrecognized arguments: --what"),
        (["table"], "invalid choice: 'table'"),
        ([], "required: command"),
    ],
)
def test_misuse_exits_with_2_and_one_sentence(arguments, says):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
