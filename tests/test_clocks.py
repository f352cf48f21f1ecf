"""The wall clock may jump: it is read only where a date is meant, and never to wait."""

from __future__ import annotations

from package_imports import ROOT

DATES = {
    "evidence.py": "when a server was caught",
    "quarantine.py": "until when it is excluded, also by other processes",
    "points.py": "kept across restarts",
    "drain.py": "a request of one machine to another",
    "records.py": "expire on other machines",
    "dht.py": "expire on other machines",
    "sockets.py": "the age of a folder",
    "checkpoints.py": "kept across restarts",
    "service.py": "shown, also after restarts",
    "responses.py": "shown",
    "listing.py": "shown",
    "answers.py": "shown",
    "swarm_state.py": "shown",
    "repositories.py": "shown",
}


def test_the_wall_clock_is_read_only_for_dates() -> None:
    package = ROOT / "swarm_plugins"
    found = {file.name for file in package.rglob("*.py") if "time.time" in file.read_text()}
    assert found == DATES.keys()
