"""Speculation says what plain decoding says: greedy to the token, sampled with the same shares."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import prompts, save_image_type
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from type_models import tiny_type_model

from swarm_plugins.checkpoint.tiny import FIRST_SPECIAL, VOCAB_SIZE
from swarm_plugins.errors import ConfigError
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation.choice import choose_sampled
from swarm_plugins.speculation.drafts import ModelDrafter, _continuation
from swarm_plugins.speculation.pace import Pace
from swarm_plugins.speculation.rows import Places, Texts
from swarm_plugins.testing.models import tiny_model

PROMPT = torch.tensor([[5, 17, 99, 23, 5, 17, 99, 23, 5, 17]])
PADDED = torch.tensor([[0, 0, 0, 11, 42, 7], [31, 64, 9, 88, 12, 101], [0, 3, 77, 14, 50, 60]])
ENDS = list(range(3, 128, 7))
FAMILIES = ("llama", "mixtral_sliding", "gpt_oss")


def near(model: PreTrainedModel) -> PreTrainedModel:
    """A model that often says what ``model`` says."""
    other = copy.deepcopy(model)
    head = other.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=generator) * 0.25 * head.std())
    return other


def greedy(model: PreTrainedModel, ids: Tensor, speculation: Any = None, **options: Any) -> Tensor:
    chosen = {} if speculation is None else {"custom_generate": speculation}
    settings = {"max_new_tokens": 20, "do_sample": False, **options}
    output: Tensor = model.generate(ids, attention_mask=(ids != 0).long(), pad_token_id=0, **settings, **chosen)  # type: ignore[operator]
    return output


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting never pays with a draft as large as its model; what is tested here is what becomes of drafts."""
    monkeypatch.setattr(Pace, "pays_to_draft", lambda self, chances, drafted: chances > 0)
    monkeypatch.setattr(Pace, "pays_to_verify", lambda self, chances, drafted: True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = tiny_model(request.param).eval()
    return model, near(model)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"eos_token_id": ENDS}], ids=str)
@pytest.mark.parametrize("ids", [PROMPT, PADDED], ids=["one row", "three rows"])
def test_greedy_tokens_are_equal(
    pair: tuple[PreTrainedModel, PreTrainedModel], ids: Tensor, options: dict[str, Any]
) -> None:
    model, draft = pair
    want = greedy(model, ids, **options)
    for one in (draft, "lookup", model):
        speculation = Speculation(one, max_tokens=5)
        assert greedy(model, ids, speculation, **options).tolist() == want.tolist()
        assert speculation.counts.tokens > 0


@pytest.mark.parametrize(("family", "differ"), [("llama", True), ("mixtral_sliding", False)])
def test_rows_accept_different_lengths_where_no_window_counts_places(
    monkeypatch: pytest.MonkeyPatch, family: str, differ: bool
) -> None:
    model = tiny_model(family).eval()
    taken: list[Tensor] = []

    def note(self: Places, drafts: Tensor, counts: Tensor, *more: Tensor) -> Places:
        taken.append(counts)
        return accepted(self, drafts, counts, *more)

    accepted = Places.accepted
    monkeypatch.setattr(Places, "accepted", note)
    speculation = Speculation(near(model), max_tokens=3)
    greedy(model, PADDED, speculation, max_new_tokens=40, eos_token_id=10_000)
    assert 0.1 < speculation.counts.accepted / speculation.counts.drafted < 0.9
    assert any(len(set(counts.tolist())) > 1 for counts in taken[:-3]) == differ
    assert speculation.counts.tokens == 120
    assert speculation.counts.rounds < 40


def test_sampled_texts_have_the_same_shares() -> None:
    model = tiny_model("llama").eval()
    draft = near(model)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 3, "max_new_tokens": 3, "num_return_sequences": 1500}
    ids = PROMPT[:, :4]

    def shares(speculation: Speculation | None) -> dict[tuple[int, ...], float]:
        texts = [tuple(row) for row in greedy(model, ids, speculation, **options)[:, 4:].tolist()]
        return {text: texts.count(text) / len(texts) for text in set(texts)}

    plain, drafted, looked_up = shares(None), shares(Speculation(draft)), shares(Speculation("lookup"))
    for other in (drafted, looked_up):
        distance = sum(abs(plain.get(text, 0.0) - other.get(text, 0.0)) for text in {*plain, *other}) / 2
        assert distance < 0.12, "27 texts, 1500 samples: about 0.05 by chance"
    assert len(plain) > 10


class _PaysForLikelyTokens(Pace):
    """Drafts one token, and verifies it if it is likely to be accepted."""

    def acceptance(self, confidence: float) -> float:
        return confidence

    def pays_to_draft(self, chances: float, drafted: int) -> bool:
        return drafted < 1

    def pays_to_verify(self, chances: float, drafted: int) -> bool:
        return chances > 0.5


def test_no_drawn_token_is_left_out_for_being_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = torch.tensor([[0.8, 0.2]])
    monkeypatch.setattr(ModelDrafter, "_next", lambda *_: probabilities)
    drafter = ModelDrafter(tiny_model("llama"), LogitsProcessorList(), vocab_size=2, do_sample=True, ends=[])
    ids, pace = torch.zeros(1, 3, dtype=torch.long), _PaysForLikelyTokens()
    torch.manual_seed(0)
    found = []
    for _ in range(1000):
        draft = drafter.propose(Texts(ids, 0), Places(ids, None, None), 8, pace)
        logits = probabilities.log().expand(1, draft.tokens.shape[1] + 1, 2)
        found.append(int(choose_sampled(logits, draft.tokens, draft.probabilities).tokens[0, 0]))
    assert abs(sum(found) / len(found) - 0.2) < 0.06, "about 0.013 by chance"


class Words(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_each_token_once() -> None:
    model = tiny_model("llama").eval()
    words = Words()
    result = greedy(model, PROMPT, partial(Speculation(model), streamer=words), return_dict_in_generate=True)
    assert words.tokens == result.sequences[0].tolist()  # type: ignore[attr-defined]
    assert words.ended == 1
    assert result.past_key_values.get_seq_length() == len(words.tokens) - 1  # type: ignore[attr-defined]


def test_a_cache_is_continued() -> None:
    model = tiny_model("llama").eval()
    first = greedy(model, PROMPT, Speculation(model), return_dict_in_generate=True, max_new_tokens=7)
    longer = torch.cat((first.sequences, PROMPT), dim=1)  # type: ignore[attr-defined]
    again = greedy(model, longer, Speculation("lookup"), past_key_values=first.past_key_values)  # type: ignore[attr-defined]
    assert again.tolist() == greedy(model, longer).tolist()


@pytest.mark.parametrize("ids", [PROMPT, PADDED], ids=["mask of ones", "padded"])
def test_a_continued_cache_needs_its_text(ids: Tensor) -> None:
    model = tiny_model("llama").eval()
    cache = DynamicCache(config=model.config)
    mask = (ids != 0).long()
    model(ids, attention_mask=mask, past_key_values=cache)
    options = {"attention_mask": torch.cat((mask, torch.ones_like(mask)), dim=1), "max_new_tokens": 2}
    num = ids.shape[1]
    with pytest.raises(ConfigError, match=f"the whole text, got {num} input_ids and a mask for {2 * num} tokens: give"):
        model.generate(ids, **options, past_key_values=cache, custom_generate=Speculation("lookup"))


def test_embeddings_of_the_prompt_stand_for_its_tokens() -> None:
    model = tiny_model("llama").eval()
    embeddings = {"inputs_embeds": model.get_input_embeddings()(PROMPT.flip(1))}
    want = greedy(model, PROMPT, **embeddings)
    for one in (model, "lookup"):
        assert greedy(model, PROMPT, Speculation(one, max_tokens=5), **embeddings).equal(want)


def test_alora_is_refused() -> None:
    """PEFT tells its layers once a generation how many last tokens they adapt."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[99, 23])
    model = get_peft_model(tiny_model("llama"), config).eval()
    with pytest.raises(ConfigError, match=r"cannot work with aLoRA, which counts from the end .* without a draft"):
        model.generate(input_ids=PROMPT, max_new_tokens=2, custom_generate=Speculation("lookup"))
    # PEFT's hooks of that call are still there.
    model.add_adapter("plain", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("plain")
    assert torch.equal(greedy(model, PROMPT, Speculation("lookup")), greedy(model, PROMPT))


@pytest.mark.parametrize("num_new", [1, 2, 4])
@torch.no_grad()
def test_the_cache_holds_the_text_when_a_row_ends_within_its_drafts(num_new: int) -> None:
    model = tiny_type_model("llama")

    def is_ended(ids: Tensor, scores: Tensor | None) -> Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] == PROMPT.shape[1] + num_new)

    speculation = Speculation(model, max_tokens=6)
    options = {"return_dict_in_generate": True, "stopping_criteria": [is_ended], "eos_token_id": 10_000}
    found: Any = greedy(model, PROMPT, speculation, **options)
    assert speculation.counts.rounds == 1, "all drafts are accepted"
    assert found.past_key_values.get_seq_length() == found.sequences.shape[1] - 1
    longer = torch.cat((found.sequences[:, -1:], PROMPT), dim=1)
    want = model(torch.cat((found.sequences, PROMPT), dim=1)).logits[:, -1]
    torch.testing.assert_close(model(longer, past_key_values=found.past_key_values).logits[:, -1], want)


@pytest.mark.parametrize("length", [4, 7, 8, 9])
@pytest.mark.parametrize("ids", [PROMPT, torch.cat((PADDED, PADDED.flip(1)), dim=1)], ids=["one row", "three rows"])
def test_tokens_are_equal_where_long_texts_have_other_rotary_frequencies(ids: Tensor, length: int) -> None:
    """Phi-3 begins again without a cache behind 8 tokens."""
    model = copy.deepcopy(tiny_type_model("phi3/longrope"))
    model.config.sliding_window = None
    options = {"max_new_tokens": 8, "eos_token_id": 10_000}
    want = greedy(model, ids[:, :length], **options)
    for one in (near(model), "lookup", model):
        assert greedy(model, ids[:, :length], Speculation(one, max_tokens=5), **options).equal(want)


@pytest.mark.parametrize("rows", [("tt",), ("tit", "t")], ids=str)
def test_tokens_of_models_with_planes_of_positions_are_equal(tmp_path: Path, rows: tuple[str, ...]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(save_image_type("qwen2_vl", tmp_path)).eval()
    inputs = prompts(model, *rows)
    inputs["input_ids"][0, -1] = inputs["input_ids"][0, 4]  # after which an image may follow
    words_only = {"suppress_tokens": list(range(FIRST_SPECIAL, VOCAB_SIZE))}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 10_000, **words_only}
    want = model.generate(**inputs, **options)
    for one in (tiny_model("llama").eval(), "lookup", model):
        assert model.generate(**inputs, **options, custom_generate=Speculation(one, max_tokens=3)).equal(want)


@pytest.mark.parametrize("length", [2, 9])
def test_new_tokens_are_of_the_last_ones_type(length: int) -> None:
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        torch.nn.init.normal_(model.transformer.wte.weight)
    ids, types = torch.arange(1, length + 1)[None], torch.tensor([[3] * (length - 1) + [4]])
    want = greedy(model, ids, token_type_ids=types)
    for draft in (near(model), "lookup"):
        assert greedy(model, ids, Speculation(draft, max_tokens=5), token_type_ids=types).tolist() == want.tolist()


def test_what_cannot_work_is_said_in_a_sentence() -> None:
    model = tiny_model("llama").eval()
    other = tiny_model("llama").eval()
    other.resize_token_embeddings(700)
    cases = {
        r"draft model has a vocabulary of 700 tokens and the model of 128: .* or draft='lookup'": (other, {}),
        r"needs num_beams=1, got 2": ("lookup", {"num_beams": 2}),
        r"returns tokens only: leave out output_scores": (
            "lookup",
            {"output_scores": True, "return_dict_in_generate": True},
        ),
        r"needs a KV cache: leave": ("lookup", {"use_cache": False}),
        r"can forget rejected tokens, got one with StaticLayer": ("lookup", {"cache_implementation": "static"}),
        r"can forget rejected tokens, got one with Fp8QuantizedLayer: leave out cache_implementation": (
            "lookup",
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        ),
        r"cannot work with UnbatchedClassifierFreeGuidanceLogitsProcessor": ("lookup", {"guidance_scale": 1.5}),
        r"cannot work with SynthIDTextWatermarkLogitsProcessor .* decode without a draft": (
            "lookup",
            {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5], ngram_len=2)},
        ),
    }
    for text, (draft, options) in cases.items():
        with pytest.raises(ConfigError, match=text):
            greedy(model, PROMPT, Speculation(draft), **options)
    with pytest.raises(ConfigError, match="a streamer takes one row, got 3"):
        greedy(model, PADDED, partial(Speculation("lookup"), streamer=Words()))
    with pytest.raises(ConfigError, match=r"invalid draft 'small': expected a model, or 'lookup'"):
        Speculation("small")
    with pytest.raises(ConfigError, match="invalid draft None: expected a model"):
        Speculation(None)  # type: ignore[arg-type]
    for wrong in (0, "8", 2.5):
        with pytest.raises(ConfigError, match=f"invalid max_tokens {wrong!r}: expected a whole number"):
            Speculation("lookup", max_tokens=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [120, 200])
def test_a_vocabulary_padded_otherwise_is_the_same(size: int) -> None:
    model = tiny_model("llama").eval()
    draft = tiny_model("llama").eval()
    draft.resize_token_embeddings(size)
    speculation = Speculation(draft)
    for options in ({}, {"do_sample": True}):
        torch.manual_seed(0)
        assert int(greedy(model, PROMPT, speculation, **options).max()) < 128
    assert greedy(model, PROMPT, speculation).tolist() == greedy(model, PROMPT).tolist()


def test_lookup_takes_the_longest_match() -> None:
    text = [*range(40, 60), 7, *range(40, 50)]
    model = tiny_model("llama").eval()
    asked: list[int] = []

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        asked.append(ids.shape[1])
        return scores

    speculation = Speculation("lookup")
    greedy(model, torch.tensor([text]), speculation, max_new_tokens=6, logits_processor=[count])
    first = list(itertools.takewhile(lambda length: length != asked[0] or not asked, asked[1:]))
    assert asked[0] == len(text)
    assert first[:4] == [len(text) + place for place in range(1, 5)], "four drafted tokens were verified at once"


class CountedText(list[int]):
    """Counts the tokens that are read one by one."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += not isinstance(index, slice)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (torch.ones(20_000, dtype=torch.long), ([1], 16)),
        (torch.arange(20_000) % 17, (list(range(8, 16)), 16)),
        (torch.tensor([1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3]), ([7, 2, 3], 2)),
        (torch.tensor([1, 2, 3, 9, 4, 3, 8, 5, 1, 2, 3]), ([9, 4, 3, 8, 5, 1, 2, 3], 3)),
    ],
    ids=["one token", "period", "latest", "longest"],
)
def test_lookup_ends_at_the_latest_of_the_longest_matches(
    ids: Tensor, found: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with each place of a long text in which one token is repeated, it takes longer than a trip."""
    text, sound = CountedText(ids.tolist()), Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: text if self is ids else sound(self))
    assert _continuation(ids, 8) == found
    assert text.num_read < 100


def test_positions_of_a_row_that_has_ended_move_with_all_places() -> None:
    places = Places(torch.ones(2, 4, dtype=torch.long), torch.tensor([[1] * 4, [0, 1, 1, 1]]), torch.arange(4)[None])
    drafts, newest = torch.full((2, 3), 7), torch.tensor([8, 9])
    longer = places.accepted(drafts, torch.tensor([2, 0]), newest, torch.tensor([True, False]))
    assert longer.positions is not None
    assert longer.positions[:, -1].tolist() == [6, 6]
    assert longer.mask is not None
    assert longer.mask[1].tolist() == [0, 1, 1, 1, 0, 0, 1]
    going_on = places.accepted(drafts, torch.tensor([2, 0]), newest, torch.tensor([True, True]))
    assert going_on.positions is not None
    assert going_on.positions[:, -1].tolist() == [6, 4]
