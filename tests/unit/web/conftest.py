from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from web_kit import TEMPLATE, byte_tokenizer, client_of, served

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.testing import InProcessSwarm, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def swarm(tiny: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(tiny) as one:
        yield one


@pytest.fixture
def model(tiny: Path, swarm: InProcessSwarm) -> Any:
    return AutoSwarmModelForCausalLM.from_pretrained(tiny, connection=swarm.connection).eval()


@pytest.fixture
def url(model: Any, tokenizer: Any) -> Iterator[str]:
    from swarm_plugins.web import create_app

    with served(create_app(model, tokenizer, name="tiny")) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as one:
        yield one


@pytest.fixture
def tool_client(model: Any, tokenizer: Any) -> Iterator[openai.OpenAI]:
    from swarm_plugins.web import create_app

    with_tools = copy.deepcopy(tokenizer)
    with_tools.chat_template = (
        "{% if tools %}{{ tools | tojson }} answer in <tool_call></tool_call>\n{% endif %}" + TEMPLATE
    )
    with served(create_app(model, with_tools, name="tiny")) as url, client_of(url) as client:
        yield client
