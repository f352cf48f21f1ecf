"""Log records as JSON."""

from __future__ import annotations

import json
import logging
import sys

from swarm_plugins.server.process import JsonFormatter


def test_a_record_is_one_line_with_its_error() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        record = logging.LogRecord("swarm.x", logging.WARNING, "f.py", 1, "peer %s\nleft", ("Qmä",), sys.exc_info())
    record.created = 1_700_000_000.25
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("error").endswith("ValueError: bad\nvalue")
    assert found == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "swarm.x",
        "message": "peer Qmä\nleft",
    }
