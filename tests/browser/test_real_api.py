"""The page in Chromium, with the real API of a model on a swarm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from page_kit import Page
from peft import LoraConfig, get_peft_model
from selenium.webdriver import Chrome
from selenium.webdriver.support.select import Select
from web_kit import TEMPLATE, served

from recipes.benchmarks.compute import SimulatedCompute
from recipes.benchmarks.links.swarm import DistantSwarm
from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.testing import save_tiny, tiny_model, tiny_tokenizer
from swarm_plugins.web import create_app

pytestmark = pytest.mark.browser

SPANS = [(0, 2), (2, 4), (2, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "lora"
    # Random numbers in both factors, so that it changes every answer.
    get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def swarm(model: Path) -> Iterator[DistantSwarm]:
    # Slow enough to be stopped, or to lose a server, in the middle of an answer.
    compute = [SimulatedCompute(call_s=0.01)] * 3
    with DistantSwarm(model, spans=SPANS, compute=compute, config=SwarmConfig(max_retries=2)) as swarm:
        yield swarm


@pytest.fixture
def page(driver: Chrome, model: Path, swarm: DistantSwarm, adapter: Path) -> Iterator[Page]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    base = AutoSwarmModelForCausalLM.from_pretrained(model, connection=swarm.connection).eval()
    base.generation_config.eos_token_id = None  # answers are as long as they may be
    with served(create_app(base, tokenizer, name="tiny", adapters=[str(adapter)])) as address:
        page = Page(driver, address)
        page.reset()
        page.open()
        page.wait_text("#welcome-title", "Talk with tiny")
        page.click("#toggle")
        yield page
        assert page.faults() == []
        driver.get("about:blank")


def ask(page: Page, text: str, most: int) -> str:
    """Asks, and returns the whole answer."""
    before = len(page.answers)
    page.type_into("#max_tokens", str(most))
    page.say(text)
    page.wait(lambda: len(page.answers) > before and page.is_shown("#again"), "no answer")
    return page.answers[-1]


def test_talk_regenerate_and_switch_the_adapter(page: Page, adapter: Path) -> None:
    first = ask(page, "Hello", 8)
    assert first
    for fact in ("tokens/s", "8 tokens", "by peer0"):
        assert fact in page.text(".facts")
    page.click("#again")
    page.wait(lambda: page.is_shown("#again") and not page.is_shown("#stop"), "no second answer")
    assert page.answers == [first]
    page.click("#new")
    Select(page.one("#model")).select_by_visible_text(f"with {adapter}")
    assert ask(page, "Hello", 8) != first


def test_the_second_turn_is_cached(page: Page) -> None:
    ask(page, "Hello", 8)
    ask(page, "And then?", 4)
    page.wait_text(".message:last-child .facts", "cached")


def test_stop_ends_the_generation(page: Page, swarm: DistantSwarm) -> None:
    page.type_into("#max_tokens", "400")
    page.say("Hello")
    page.wait(lambda: page.answers[-1:] not in ([], [""]), "the answer does not begin")
    assert swarm.num_sessions > 0
    page.click("#stop")
    page.wait_text(".note", "Stopped.")
    # A generation that goes on to its end keeps its sessions for the next turn.
    page.wait(lambda: swarm.num_sessions == 0, "servers still hold the session")
    assert ask(page, "Hello", 2), "the next one is answered"


def test_a_killed_server_changes_no_answer_and_a_gap_is_seen(page: Page, swarm: DistantSwarm) -> None:
    whole = ask(page, "Hello", 40)
    page.click("#new")
    page.say("Hello")
    page.wait(lambda: page.answers[-1:] not in ([], [""]), "the answer does not begin")
    used = [peer for peer in ("peer1", "peer2") if swarm.services[peer].sessions]
    assert used
    swarm.kill(used[0])
    page.wait(lambda: page.is_shown("#again"), "the answer does not end")
    assert page.answers == [whole]
    page.click("nav a[href='#swarm']")
    page.wait_text(".model > .head .pill", "Every block has a server")
    swarm.kill("peer0")
    page.wait_text(".gap", "Blocks 0:2: no server.")
    page.click("nav a:first-child")
    page.say("Hello")
    page.wait_text(".message .notice", "No living server holds blocks 0:2")


def test_a_message_beyond_the_context_is_one_sentence(page: Page) -> None:
    page.type_into("#max_tokens", "100000000")
    page.say("Hello")
    page.wait_text(".message .notice", "tokens")
    assert page.text("#again") == "Try again"
