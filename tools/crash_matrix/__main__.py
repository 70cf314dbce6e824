"""`python3 dev.py crash-matrix`: at each fail point, in each pool and on each broker, a process dies or stands still.

Or it is cut off from the database. Each run has to end once, with the right result and no finished step repeated.

The last line of the output is one JSON object. Exit status: 0 when each cell passed, 1 otherwise, 2 when it could not
be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

TESTS = "tests/crash"


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what is not of this command goes to pytest, such as `-k step.commit`."""
    parser = argparse.ArgumentParser(
        prog="python3 dev.py crash-matrix", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.set_defaults(cells="pairwise")
    chosen = parser.add_mutually_exclusive_group()
    for name, told in (
        ("ci", "two cells for each point"),
        ("pairwise", "each pair of point, event, pool and broker (default)"),
        ("full", "every cell"),
    ):
        chosen.add_argument(f"--{name}", dest="cells", action="store_const", const=name, help=told)
    return parser.parse_known_args(argv)


def outcomes(report: Path) -> dict[str, str]:
    """Return what became of each cell, by its name: `passed`, `failed` or `skipped`."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by our own pytest a moment ago
        name = case.get("name", "")
        if "[" in name:
            kinds = {child.tag for child in case}
            state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[name.partition("[")[2].rstrip("]")] = state
    return found


def main(argv: Sequence[str]) -> int:
    """Run the cells and return the exit status."""
    options, others = arguments(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="umt-crash-") as folder:
        report = Path(folder) / "report.xml"
        spread = [] if any(one.startswith(("-n", "--numprocesses")) for one in others) else ["-n", "4"]
        status = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", TESTS, "-m", "", f"--cells={options.cells}"),
                *("-k", "test_i1", f"--junitxml={report}", *spread, *others),
            ],
            check=False,
        ).returncode
        found = outcomes(report) if report.exists() else {}
    if not found:
        return status or 2
    counts = {state: sum(one == state for one in found.values()) for state in ("passed", "failed", "skipped")}
    failed = sorted(name for name, state in found.items() if state == "failed")
    if failed:
        print(f"One of them again: python3 dev.py crash-matrix --{options.cells} -k {failed[0]}", flush=True)
    summary = {"command": "crash-matrix", "choice": options.cells, "cells": len(found), **counts, "failures": failed}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if failed or counts["skipped"] or counts["passed"] == 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
