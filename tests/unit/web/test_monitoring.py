"""`/metrics` of an API: what Prometheus reads, for those who show a key."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from web_kit import byte_tokenizer, served

from swarm_plugins.testing.models import tiny_model
from swarm_plugins.web import ApiSettings, create_app


def test_a_local_model_has_metrics_of_its_requests_but_none_of_servers() -> None:
    app = create_app(tiny_model("llama"), byte_tokenizer(), name="tiny", settings=ApiSettings(api_keys=("secret",)))
    with served(app) as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/metrics", timeout=30)
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    assert "swarm_api_running_requests 0.0" in text
    assert "process_resident_memory_bytes" in text
    assert "swarm_client" not in text
