"""The dashboard for Grafana asks for nothing but what servers and clients expose; the page describes all of that."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.metrics.endpoint import Endpoint
from swarm_plugins.metrics.server import ServerCollector
from swarm_plugins.testing.models import save_tiny
from tests.unit.metrics.metrics_kit import Server, busy_swarm

HOW_TO = Path(__file__).parent.parent.parent / "docs/how-to"
DASHBOARD: dict[str, Any] = json.loads((HOW_TO / "swarm-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
# Labels that Prometheus adds, or Grafana's variables fill.
ADDED = {"instance", "job"}


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample that a server and a client show over HTTP after work, failures and repairs."""
    model = save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
    with busy_swarm(model) as swarm, Endpoint("127.0.0.1", 0) as endpoint:
        endpoint.registry.register(ServerCollector(Server(swarm, swarm.peers[0])))
        endpoint.registry.register(ClientCollector(swarm.connection))
        with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def names_in(query: str) -> list[str]:
    return re.findall(r"\b(?:swarm|process)_\w+", query)


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_names_metrics_and_labels_that_exist(query: str, exposed: dict[str, set[str]]) -> None:
    assert names_in(query)
    assert set(names_in(query)) <= exposed.keys()
    known = set.union(*(exposed[name] for name in names_in(query))) | ADDED
    used = set(re.findall(r"(\w+)=~?\"", query))
    used |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    assert used <= known
    assert query.count("(") == query.count(")")
    # A counter is of use as a rate only.
    for name in re.findall(r"swarm_\w+_(?:total|sum|count|bucket)\b", query):
        assert re.search(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[\$__rate_interval\]\)", query), name


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_legend_shows_labels_that_the_query_keeps(panel: dict[str, Any], exposed: dict[str, set[str]]) -> None:
    for target in panel["targets"]:
        groups = re.findall(r"by \(([^)]*)\)", target["expr"])
        kept = set.union(*(exposed[name] for name in names_in(target["expr"]))) | ADDED
        kept = {label.strip() for group in groups for label in group.split(",")} if groups else kept
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_it_is_a_dashboard_that_grafana_imports() -> None:
    assert DASHBOARD["id"] is None, "Grafana numbers it"
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= DASHBOARD.keys()
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in PANELS:
        assert {"type", "title", "description", "datasource", "fieldConfig", "options", "targets"} <= panel.keys()
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_lie_in_the_grid_and_on_no_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for place in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert place not in taken, f"{panel['title']} lies on {taken[place]}"
            taken[place] = panel["title"]


def test_the_page_describes_every_metric(exposed: dict[str, set[str]]) -> None:
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in exposed if name.startswith("swarm_")}
    described = set(re.findall(r"`(swarm_(?:server|client)_\w+)`", (HOW_TO / "metrics.md").read_text()))
    assert described == families
