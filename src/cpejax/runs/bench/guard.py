"""Runs a command until its own standard input ends: `python guard.py SECONDS COMMAND ...`.

`cpejax bench` starts it, with a pipe, as the leader of a process group of its own. However the benchmark ends, be it by
SIGKILL, the pipe ends with it; then the whole group is asked to end, as by Ctrl-C (Snakemake cancels jobs on a
cluster), and what is still there after SECONDS is killed. It imports little, because it starts before all else.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

POLL = 0.2
"""Seconds between looks at the command."""


def main(seconds: float, command: list[str]) -> int:
    """Run the command: what it returned, unless the group was ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # this process stays to the last; the command gets the default back
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    while process.poll() is None:
        if select.select([sys.stdin], [], [], POLL)[0]:
            os.killpg(0, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            os.killpg(0, signal.SIGKILL)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
