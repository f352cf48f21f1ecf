"""transformers' ``pipeline("text-generation")`` on a swarm model and on an offloaded one: what the local model says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer, pipeline

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, load_offloaded
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

TEMPLATE = "{% for turn in messages %}{{ turn['role'][0] }}:{{ turn['content'] }};{% endfor %}a:"
PROMPTS = ["what is it", "a longer prompt than the others", "why"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def text_pipeline(directory: Path, model: PreTrainedModel) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module", params=["swarm", "offloaded"])
def pipelines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The pipeline of the model elsewhere, and that of the same model in memory."""
    is_swarm = request.param == "swarm"
    directory = save_tiny("llama" if is_swarm else "mixtral", tmp_path_factory.mktemp(request.param))
    local = text_pipeline(directory, AutoModelForCausalLM.from_pretrained(directory).eval())
    if is_swarm:
        with InProcessSwarm(directory) as swarm:
            remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
            yield text_pipeline(directory, remote), local
    else:
        yield text_pipeline(directory, load_offloaded(directory, OffloadConfig(fast_bytes=100_000))), local


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        pytest.param(PROMPTS[0], GREEDY, id="prompt"),
        pytest.param(PROMPTS, {**GREEDY, "batch_size": 3}, id="batch"),
        pytest.param(PROMPTS, {**GREEDY, "return_full_text": False}, id="one-by-one"),
        pytest.param(CHATS[1], GREEDY, id="chat"),
        pytest.param(CHATS, {**GREEDY, "batch_size": 2}, id="chats"),
        pytest.param(PROMPTS[0], {"max_new_tokens": 8, "num_return_sequences": 3}, id="sampled"),
        pytest.param(PROMPTS[0], {**GREEDY, "num_beams": 3}, id="beams"),
    ],
)
def test_it_says_what_the_local_model_says(pipelines: tuple[Any, Any], inputs: Any, options: dict[str, Any]) -> None:
    said = []
    for one in pipelines:
        torch.manual_seed(5)
        said.append(one(inputs, **options))
    assert said[0] == said[1]


class Words(TextStreamer):
    """Keeps what it would print."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.words: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.words.append(text)


def test_it_streams(pipelines: tuple[Any, Any]) -> None:
    elsewhere, _ = pipelines
    streamer = Words(elsewhere.tokenizer)
    (answer,) = elsewhere(CHATS[0], streamer=streamer, **GREEDY)
    assert "".join(streamer.words) == answer["generated_text"][-1]["content"] != ""
