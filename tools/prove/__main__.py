"""`python3 dev.py prove`: the crash matrix, chaos on both brokers and the planted bugs, one after the other.

The last line of the output is one JSON object with what each of them gave. Exit status: 0 when all held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

CI_MINUTES: Final = 2.5
"""How long chaos lasts on each broker where a change is checked: five minutes together."""


def parts(*, ci: bool, minutes: float, seed: int | None) -> list[tuple[str, list[str]]]:
    """Return the name of each part, and the module and arguments that make it."""
    draw = [] if seed is None else ["--seed", str(seed)]
    lasting = ["--minutes", str(CI_MINUTES if ci else minutes)]
    return [
        ("crash-matrix", ["tools.crash_matrix", "--ci" if ci else "--pairwise"]),
        *(
            (f"chaos-{broker}", ["tools.chaos", "--broker", broker, *lasting, *draw])
            for broker in ("redis", "rabbitmq")
        ),
        ("mutants", ["tools.mutants"]),
    ]


def run(arguments: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run a part, showing its output as it comes; return its exit status and the object of its last line."""
    last = ""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", *arguments], stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
    try:
        told = json.loads(last)
    except ValueError:
        told = {}
    return process.returncode, told if isinstance(told, dict) else {}


def main(argv: Sequence[str]) -> int:
    """Run all parts, whatever becomes of each, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python3 dev.py prove", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="the shorter form that checks a change")
    parser.add_argument("--minutes", type=float, default=30.0, help="of chaos, on each broker (default: 30)")
    parser.add_argument("--seed", type=int, help="what chaos is drawn from (default: a new one)")
    options = parser.parse_args(argv)
    began = time.monotonic()
    found, failed = {}, []
    for name, arguments in parts(ci=options.ci, minutes=options.minutes, seed=options.seed):
        print(f"== {name}", flush=True)
        status, found[name] = run(arguments)
        if status:
            failed.append(name)
    print(json.dumps({"command": "prove", "failed": failed, **found, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
