"""Conversations: what is remembered, what fits, what ends them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer
from typer.testing import CliRunner

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.cli.main import app
from swarm_plugins.distill.pair import load_language_model
from swarm_plugins.errors import ConfigError
from swarm_plugins.speculation import Speculation
from swarm_plugins.talk import loop
from swarm_plugins.talk.loading import load_draft, load_model, split_tag
from swarm_plugins.talk.turns import Conversation
from swarm_plugins.testing.models import save_tiny, tiny_config, tiny_model, tiny_tokenizer

NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGRUXUMBKBKYJSPBpGNcGJJk2FnZbLpwfTXLNvMkVW4Rd"
TEMPLATE = "{% for turn in messages %}{{ turn['role'][0] }}:{{ turn['content'] }};{% endfor %}a:"


def conversation(**settings: Any) -> Conversation:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Conversation(tiny_model("llama").eval(), tokenizer, **{"max_new_tokens": 4, "temperature": 0.0, **settings})


def test_answers_stream_and_are_remembered() -> None:
    words: list[str] = []
    talked = conversation(system="be brief")
    talked.answer("hello", words.append)
    talked.answer("and?", words.append)
    assert [turn["role"] for turn in talked.turns] == ["user", "assistant"] * 2
    assert "".join(words) == talked.turns[1]["content"] + talked.turns[3]["content"] != ""
    talked.forget()
    assert talked.turns == []


def test_the_answer_continues_a_text_that_the_tokenizer_ends() -> None:
    plain = Conversation(tiny_model("llama"), ByT5Tokenizer(extra_ids=0), max_new_tokens=1)
    plain.turns = [{"role": "user", "content": "ab"}]
    assert plain._tokens(plain.turns).tolist() == [[ord("a") + 3, ord("b") + 3]]


@pytest.mark.filterwarnings("ignore:This sequence already has </s>:UserWarning")  # of ByT5's tokenizer
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "ends-texts"])
@pytest.mark.parametrize("num_ends", [1, 2])
def test_an_end_in_the_text_itself_stays(is_plain: bool, num_ends: int) -> None:
    tokenizer = tiny_tokenizer() if is_plain else ByT5Tokenizer(extra_ids=0)
    plain = Conversation(tiny_model("llama"), tokenizer, max_new_tokens=1)
    ids = plain._tokens([{"role": "user", "content": f"ab{tokenizer.eos_token * num_ends}"}])[0].tolist()
    assert ids[-num_ends:] == [tokenizer.eos_token_id] * num_ends
    assert ids[-num_ends - 1] != tokenizer.eos_token_id


def test_oldest_turns_are_forgotten_when_the_model_cannot_read_more() -> None:
    talked = conversation(max_new_tokens=2)  # of 512 that it reads
    for number in range(4):
        talked.answer(f"{number}" * 200, lambda _: None)
    assert [turn["content"][0] for turn in talked.turns if turn["role"] == "user"] == ["2", "3"]


def test_a_text_too_long_says_both_lengths_and_is_not_kept() -> None:
    talked = conversation(max_new_tokens=12)
    talked.answer("before", lambda _: None)
    before = [*talked.turns]
    with pytest.raises(ConfigError, match=r"prompt is 605 tokens long, at most 500 leave room for an answer: say less"):
        talked.answer("x" * 600, lambda _: None)
    assert talked.turns == before


def test_a_template_that_refuses_the_messages_is_one_sentence() -> None:
    talked = conversation(system="be brief")
    talked.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ConfigError, match=r"messages \(System role not supported\); if it takes no system message, leave"
    ):
        talked.answer("hello", lambda _: None)
    assert talked.turns == []


def test_an_answer_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-new-tokens 512 leaves no room .* reads 512 tokens; .* at most 256"):
        conversation(max_new_tokens=512)


def test_what_came_before_an_interruption_is_remembered() -> None:
    talked = conversation(max_new_tokens=8)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talked.answer("hello", interrupt)
    assert [turn["role"] for turn in talked.turns] == ["user", "assistant"]


class Spoken:
    """A conversation that notes what it is asked."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def answer(self, text: str, write: Callable[[str], Any]) -> None:
        self.heard.append(text)
        if text == "stop":
            raise KeyboardInterrupt
        if text == "long":
            raise ConfigError("say less")
        write(f"you said {text}")

    def forget(self) -> None:
        self.heard.append("(new)")


def test_a_pipe_gives_a_prompt_a_line_and_an_interrupted_answer_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nstop\nlong\n/new\ntwo\n/exit\nthree\n"))
    spoken: Any = Spoken()
    loop.talk(spoken)
    assert spoken.heard == ["one", "stop", "long", "(new)", "two"]
    said = capsys.readouterr()
    assert said.out == "you said one\n ...\nyou said two\n"
    assert said.err == "swarm chat: say less\n"


def test_given_prompts_are_answered_as_turns_of_one_conversation_and_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = saved_tokenizer(tmp_path)
    monkeypatch.setattr(
        "swarm_plugins.talk.loading.load_model", lambda *_, **__: SimpleNamespace(model=None, tokenizer=None)
    )
    spoken = Spoken()
    monkeypatch.setattr("swarm_plugins.talk.turns.Conversation", lambda *_: spoken)
    prompts = ["--prompt", "one", "--prompt", "two"]
    result = CliRunner().invoke(app, ["chat", model, "--initial-peers", NOWHERE, *prompts], input="three\n")
    assert (result.exit_code, result.stdout) == (0, "you said one\nyou said two\n")
    assert spoken.heard == ["one", "two"]


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        pytest.param("me/mine", ("me/mine", "latest"), id="newest"),
        pytest.param("me/mine@v2", ("me/mine", "v2"), id="tag"),
    ],
)
def test_an_adapter_of_the_hub_may_have_a_tag(adapter: str, expected: tuple[str, str]) -> None:
    assert split_tag(adapter) == expected


def test_an_adapter_in_a_folder_has_none(tmp_path: Path) -> None:
    assert split_tag(str(tmp_path)) == (tmp_path, "latest")


def test_a_tag_that_is_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"invalid --adapter 'me/mine@': expected a folder, USER/NAME or"):
        split_tag("me/mine@")


def test_without_an_address_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    result = CliRunner().invoke(app, ["chat", "anything"])
    assert result.exit_code == 2
    assert "no address of the swarm: give --initial-peers ADDRESS" in " ".join(result.output.split())


def saved_tokenizer(folder: Path, *, words: tuple[str, ...] = ()) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(words))
    tokenizer.save_pretrained(folder)
    tiny_config("llama").save_pretrained(folder)
    return str(folder)


def chat_with_draft(model: str, draft: str) -> str:
    """Returns what a chat that is a wrong call says."""
    result = CliRunner().invoke(app, ["chat", model, "--initial-peers", NOWHERE, "--draft", draft])
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_a_draft_of_another_vocabulary_is_one_sentence_before_anything_is_reached(tmp_path: Path) -> None:
    model = saved_tokenizer(tmp_path / "model")
    draft = saved_tokenizer(tmp_path / "draft", words=("hello",))
    said = chat_with_draft(model, draft)
    assert f"swarm chat: the draft model '{draft}' has another vocabulary (102 tokens) than '{model}' (101)" in said
    assert "give a smaller model of the same family, or lookup" in said


def test_a_draft_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    model = saved_tokenizer(tmp_path / "model")
    assert chat_with_draft(model, str(tmp_path)).startswith(f"swarm chat: {tmp_path} has no config.json: give")
    assert "invalid --draft 'look': expected lookup (drafts from the text), the dir" in chat_with_draft(model, "look")


def test_a_draft_without_a_tokenizer_is_one_sentence_of_ours(tmp_path: Path) -> None:
    model, draft = saved_tokenizer(tmp_path / "model"), tmp_path / "draft"
    tiny_model("llama").save_pretrained(draft)
    said = chat_with_draft(model, str(draft))
    assert f"'{draft}' has no tokenizer that can be loaded (none of its files is a tokenizer's, such as" in said


def test_a_drafted_answer_is_the_plain_one_and_streams() -> None:
    plain, words = conversation(max_new_tokens=12), list[str]()
    plain.answer("hello", lambda _: None)
    speculation = Speculation(tiny_model("llama").eval())
    drafted = conversation(max_new_tokens=12, speculation=speculation)
    drafted.answer("hello", words.append)
    assert drafted.turns == plain.turns
    assert "".join(words) == plain.turns[1]["content"]
    assert speculation.counts.rounds > 0


def test_a_model_is_found_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "tiny", num_layers=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load_model("~/tiny", None, device="cpu")
    assert loaded.tokenizer("a")["input_ids"]
    here = AutoSwarmModelForCausalLM.from_pretrained("~/tiny", offload="none")
    for model in (loaded.model, here, load_language_model("teacher", "~/tiny")):
        assert model.config.num_hidden_layers == 1


def test_a_draft_is_kept_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    draft = load_draft("~/tiny")
    assert not isinstance(draft, str)
    kinds = {type(part).__name__ for part in draft.modules()}
    assert "PackedLinear" in kinds
    model = tiny_model("llama").eval()
    ids = torch.arange(5, 15)[None]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    said = model.generate(ids, custom_generate=Speculation(draft), **options)  # type: ignore[operator]
    assert said.equal(model.generate(ids, **options))  # type: ignore[operator]
