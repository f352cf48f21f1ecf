"""One JSON object a line for each log record, for collectors of logs."""

from __future__ import annotations

import datetime
import json
import logging

_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}


class JsonFormatter(logging.Formatter):
    """Formats a record as ``time`` (UTC), ``level``, ``logger``, ``message``, and ``error`` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            # Not by name: hivemind renames levels.
            "level": _LEVELS.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
