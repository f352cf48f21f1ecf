"""Stands in for the interpreter where a program starts others: they are forked with their imports done, see `programs`.

It answers as they would: with their output, signals and exit status. What is no script or module runs in the
interpreter itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> None:
    if sys.argv[1].startswith("-") and sys.argv[1] not in ("-m", "-u"):
        os.execv(os.environ["FORKED_PYTHON_IS"], [os.environ["FORKED_PYTHON_IS"], *sys.argv[1:]])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(os.environ["FORKED_PYTHON_LINE"])
        news, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"command": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "swarms": False}
        socket.send_fds(line, [json.dumps(request).encode()], [0, 1, 2, other.fileno()])
        other.close()
    pid = int(news.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(news.recv(64) or -signal.SIGKILL)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
