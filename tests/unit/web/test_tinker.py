"""The unmodified SDK trains and samples: on a swarm, with offloaded experts, and on a model in memory."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from tinker.lib.retryable_exception import RetryableException
from tinker_kit import KEYS, NAME, client_at, datum, serving
from torch.nn import functional
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.testing import InProcessSwarm, save_tiny
from swarm_plugins.tuning.tuner import Tuner
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Generation

# The SDK leaves connections to the collector of garbage.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
TEXTS = [[5, 9, 17, 33, 4], [8, 61, 7, 90, 12, 13, 99, 20], [40, 41, 42]]
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


@pytest.fixture(autouse=True)
def _says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("mixture") / "tiny")


@pytest.fixture(scope="module", params=["swarm", "offloaded", "memory"])
def anywhere(request: pytest.FixtureRequest, mixture: Path) -> Iterator[Any]:
    """A mixture in each of the three places."""
    if request.param == "memory":
        yield AutoModelForCausalLM.from_pretrained(mixture).eval()
    elif request.param == "offloaded":
        yield AutoSwarmModelForCausalLM.from_pretrained(mixture, offload=OffloadConfig(fast_bytes=1 << 20)).eval()
    else:
        with InProcessSwarm(mixture) as swarm:
            yield AutoSwarmModelForCausalLM.from_pretrained(mixture, connection=swarm.connection).eval()


@pytest.fixture
def plain(mixture: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(mixture).eval()


@pytest.fixture
def url(plain: Any, tokenizer: Any, tmp_path: Path) -> Iterator[str]:
    with serving(plain, tokenizer, tmp_path) as address:
        yield address


@pytest.fixture
def rest(url: str) -> Iterator[Any]:
    with client_at(url, kind=tinker.RestClient) as one:
        yield one


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with client_at(url) as one:
        yield one


def trained(client: Any, steps: int = 2, **lora: Any) -> Any:
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1, **lora).result()
    for _ in range(steps):
        calls = [training.forward_backward([datum(ids)], "cross_entropy") for ids in TEXTS]
        step = training.optim_step(types.AdamParams(learning_rate=0.02))
        assert all(call.result() for call in calls)
        assert step.result()
    return training


def losses_of(model: Any) -> list[float]:
    found = []
    for ids in TEXTS:
        logits = model(torch.tensor([ids[:-1]])).logits[0, 1 - len(ids) :]
        found.append(functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item())
    return found


def test_what_is_trained_anywhere_is_peft_and_torch(anywhere: Any, tokenizer: Any, plain: Any, tmp_path: Path) -> None:
    with serving(anywhere, tokenizer, tmp_path) as url, client_at(url) as client:
        training = trained(client)
        folder = find_checkpoint(tmp_path, training.save_state("end").result().path)
        local = PeftModel.from_pretrained(plain, str(folder)).eval()
        # An ordinary PEFT folder, which gives the same losses on plain transformers.
        result = training.forward([datum(ids) for ids in TEXTS], "cross_entropy").result()
        assert [-float(sum(one["logprobs"].data)) for one in result.loss_fn_outputs] == pytest.approx(
            losses_of(local), rel=1e-4
        )
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = TEXTS[1]
        sample = sampler.sample(types.ModelInput.from_ints(prompt), 1, GREEDY).result().sequences[0]
        with torch.no_grad():
            wanted = local.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
            )
        assert sample.tokens == wanted[0, len(prompt) :].tolist()
        # The same blocks compute both: the ratio of policy gradients starts at 1.
        seen = training.forward([datum([*prompt, *sample.tokens])], "cross_entropy").result().loss_fn_outputs[0]
        assert sample.logprobs == pytest.approx(seen["logprobs"].data[-6:], abs=5e-5)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *sample.tokens])).result()
        assert scored[0] is None
        assert scored[1:] == pytest.approx(seen["logprobs"].data, abs=5e-5)


def find_checkpoint(state_dir: Path, path: str) -> Path:
    return state_dir / "runs" / path.removeprefix("tinker://")


def test_a_saved_state_goes_on_exactly(client: Any) -> None:
    first = trained(client)
    path = first.save_state("two").result().path
    second = client.create_training_client_from_state_with_optimizer(path).result()
    for training in (first, second):
        training.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    one, other = (training.forward([datum(TEXTS[1])], "cross_entropy").result() for training in (first, second))
    assert one.metrics == other.metrics
    # Of older scripts, and deprecated.
    third = client.create_lora_training_client(base_model=NAME, rank=4).result()
    with pytest.warns(FutureWarning, match="load_state"):
        third.load_state_with_optimizer(path).result()
    third.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    third.optim_step(types.AdamParams(learning_rate=0.02)).result()
    assert third.forward([datum(TEXTS[1])], "cross_entropy").result().metrics == one.metrics


def test_a_custom_loss_is_computed_at_the_client(client: Any, plain: Any) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()

    def squared(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([one.square().sum() for one in logprobs]).sum()
        return loss, {"squared:sum": loss.item()}

    found = training.forward_backward_custom([datum(TEXTS[0])], squared).result()
    logits = plain(torch.tensor([TEXTS[0][:-1]])).logits[0].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(TEXTS[0][1:])[:, None]).square().sum()
    assert found.metrics["squared:sum"] == pytest.approx(float(wanted), rel=1e-4)
    assert training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "IA3", "target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
        {"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj"]},
        {"peft_type": "LORA", "r": 2, "use_dora": True, "target_modules": ["q_proj"]},
    ],
    ids=lambda settings: settings["peft_type"],
)
def test_other_methods_of_peft(client: Any, plain: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    metadata = {"peft_config": json.dumps(settings)}
    training = client.create_lora_training_client(base_model=NAME, rank=1, seed=1, user_metadata=metadata).result()
    for _ in range(3):
        training.forward_backward([datum(ids) for ids in TEXTS], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = training.save_state("end").result().path
    found = training.forward([datum(ids) for ids in TEXTS], "cross_entropy").result()
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert again.forward([datum(ids) for ids in TEXTS], "cross_entropy").result().metrics == found.metrics
    local = PeftModel.from_pretrained(plain, str(find_checkpoint(tmp_path, path))).eval()
    assert sum(losses_of(local)) == pytest.approx(found.metrics["loss:sum"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "peft_config is not JSON"),
        ("[]", "peft_config is a list"),
        ('{"peft_type": "PISSA"}', "has the type 'PISSA'; known: LORA"),
        ('{"peft_type": "LORA", "init_lora_weights": "pissa"}', "changes the base"),
        ('{"peft_type": "LORA", "bias": "lora_only"}', "trains the base's own biases"),
        ('{"peft_type": "LORA", "target_modules": ".*"}', "name the modules instead"),
        ('{"peft_type": "LORA", "r": 100000}', "a rank above 4096"),
        ('{"peft_type": "LORA", "target_modules": ["nothing"]}', "does not fit this model"),
        ('{"peft_type": "LORA", "odd": 1}', "does not fit this model"),
        ('{"peft_type": "LORA", "target_modules": ["q_proj"], "runtime_config": {}}', "does not fit this model"),
    ],
)
def test_configs_of_peft_that_are_refused(client: Any, settings: str, message: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message):
        client.create_lora_training_client(base_model=NAME, user_metadata={"peft_config": settings}).result()


@pytest.mark.parametrize("is_loaded", [False, True], ids=["fresh", "loaded"])
def test_models_asked_for_at_once_are_bounded(client: Any, monkeypatch: pytest.MonkeyPatch, is_loaded: bool) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.sessions._MAX_MODELS", 3)
    path = client.create_lora_training_client(base_model=NAME, rank=1).result().save_state("a").result().path

    def ask() -> Any:
        if is_loaded:
            return client.create_training_client_from_state(path)
        return client.create_lora_training_client(base_model=NAME, rank=1)

    refused = [error for error in map(error_of, [ask() for _ in range(8)]) if error]
    assert len(refused) == 6
    assert "3 models are in training by this key" in refused[0]


def test_calls_of_many_texts_are_one(client: Any) -> None:
    texts = [datum(TEXTS[index % 3]) for index in range(600)]  # more than one request takes
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    result = training.forward_backward(texts, "cross_entropy").result()
    single = training.forward([datum(ids) for ids in TEXTS], "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 600
    assert result.metrics["loss:sum"] == pytest.approx(200 * single.metrics["loss:sum"], rel=1e-4)


def test_sparse_targets_are_a_distillation(client: Any, plain: Any) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    targets = torch.zeros(4, 30, dtype=torch.int64)
    weights = torch.zeros(4, 30)
    targets[:, :2], weights[:, :2] = torch.tensor([7, 8]), torch.tensor([0.75, 0.25])
    text = types.Datum(
        model_input=types.ModelInput.from_ints(TEXTS[0][:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(targets),
            "weights": types.TensorData.from_torch_sparse(weights),
        },
    )
    found = training.forward_backward([text], "cross_entropy").result().metrics["loss:sum"]
    logprobs = plain(torch.tensor([TEXTS[0][:-1]])).logits[0].log_softmax(-1)
    assert found == pytest.approx(-float((logprobs[:, 7] * 0.75 + logprobs[:, 8] * 0.25).sum()), rel=1e-4)


def test_losses_of_all_tokens_are_computed_in_one_forward(client: Any, plain: Any) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    targets, reference = torch.tensor([[7, 8]] * 4), torch.tensor([[0.75, 0.2]] * 4).log()
    inputs = {"target_tokens": targets, "logprobs": reference, "weights": torch.tensor([0.0, 1.0, 1.0, 2.0])}
    text = types.Datum(
        model_input=types.ModelInput.from_ints(TEXTS[0][:-1]),
        loss_fn_inputs={name: types.TensorData.from_torch(value) for name, value in inputs.items()},
    )
    logprobs = plain(torch.tensor([TEXTS[0][:-1]])).logits[0].log_softmax(-1)
    named = logprobs.gather(1, targets).exp()
    ours = torch.cat([named, 1 - named.sum(1, keepdim=True)], 1)
    theirs = torch.tensor([0.75, 0.2, 0.05])
    wanted = inputs["weights"] * (ours * (ours.log() - theirs.log())).sum(1)
    found = training.forward_backward([text], "reverse_kl").result()
    assert found.metrics["loss:sum"] == pytest.approx(float(wanted.sum()), rel=1e-4)
    (output,) = found.loss_fn_outputs
    assert output["elementwise_loss"].data == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-6)
    assert output["logprobs"].to_torch().shape == (4, 2)
    settings = {"entropy_bonus": 0.5}
    sampled = datum(TEXTS[0], logprobs=[-1.0] * 4, advantages=[1.0] * 4)
    plainly, rewarded = (
        training.forward([sampled], "ppo", one).result().metrics["loss:sum"] for one in (None, settings)
    )
    entropy = -(logprobs.exp() * logprobs).sum()
    assert plainly - rewarded == pytest.approx(0.5 * float(entropy), rel=1e-4)
    assert training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0


def test_samples(client: Any, tokenizer: Any) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(TEXTS[1])

    def draw(count: int = 1, **params: Any) -> Any:
        chosen = types.SamplingParams(**{"max_tokens": 5, "stop": [], **params})
        return sampler.sample(prompt, count, chosen).result().sequences

    first, again, other = draw(4, seed=3), draw(4, seed=3), draw(4, seed=4)
    assert [one.tokens for one in first] == [one.tokens for one in again] != [one.tokens for one in other]
    assert len({tuple(one.tokens) for one in first}) > 1
    assert {one.stop_reason for one in first} == {"length"}
    (greedy,) = draw(temperature=0.0)
    (stopped,) = draw(temperature=0.0, stop=[greedy.tokens[2]])
    # What ends an answer is part of it.
    length = 1 + min(
        greedy.tokens.index(end) for end in (tokenizer.eos_token_id, greedy.tokens[2]) if end in greedy.tokens
    )
    assert stopped.tokens == greedy.tokens[:length]
    assert (stopped.stop_reason, len(stopped.logprobs)) == ("stop", length)
    top = sampler.sample(prompt, 1, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert len(top.prompt_logprobs) == len(TEXTS[1])
    assert [len(one or ()) for one in top.topk_prompt_logprobs][1:] == [3] * (len(TEXTS[1]) - 1)


def test_samples_of_many_prompts_wait_for_their_turn(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.engine.engine.MAX_WAITING", 0)
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompts = [types.ModelInput.from_ints([5, last]) for last in range(5, 35)]
    calls = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
    assert all(call.result().sequences for call in calls)


def test_tokens_that_a_request_names_are_scored_over_the_prompt(client: Any, plain: Any) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompt, named = TEXTS[0], torch.tensor([[7, 8], [9, 10], [11, 12], [13, 0]])
    logprobs = plain(torch.tensor([prompt[:-1]])).logits[0].log_softmax(-1)

    def scored(tensor: Any, **options: Any) -> Any:
        return sampler.sample(
            types.ModelInput.from_ints(prompt), 1, GREEDY, target_prompt_logprobs=tensor, **options
        ).result()

    dense = scored(types.TensorData.from_torch(named), include_prompt_logprobs=True, prompt_logprobs_last_n=2)
    torch.testing.assert_close(dense.target_prompt_logprobs.to_torch(), logprobs.gather(1, named), rtol=1e-4, atol=1e-5)
    assert [one is None for one in dense.prompt_logprobs] == [True, True, True, False, False]
    wide, expected = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(4, 30)
    wide[:3, :2], expected[:3, :2] = named[:3], logprobs.gather(1, named)[:3]
    sparse = scored(types.TensorData.from_torch_sparse(wide)).target_prompt_logprobs.to_torch()
    torch.testing.assert_close(sparse, expected, rtol=1e-4, atol=1e-5)
    for wrong, message in (
        (torch.zeros(3, 2, dtype=torch.int64), r"has shape \[3, 2\], but the prompt has 5 tokens"),
        (torch.zeros(4, 65, dtype=torch.int64), "K from 1 to 64"),
        (torch.full((4, 1), 10_000), "outside of the vocabulary"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            scored(types.TensorData.from_torch(wrong))
    with pytest.raises(tinker.RequestFailedError, match="prompt_alt_tokens_k is not known here"):
        sampler.sample(types.ModelInput.from_ints(prompt), 1, GREEDY, prompt_alt_tokens_k=2).result()


def test_prompts_that_are_read_whole_are_as_short_as_in_training(
    plain: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.service.is_read_whole", lambda model: True)
    monkeypatch.setattr("swarm_plugins.web.tinker.trainers.free_host_bytes", lambda: 0)
    monkeypatch.setattr("swarm_plugins.web.tinker.trainers._LEAST_TOKENS", 3)
    with serving(plain, tokenizer, tmp_path) as url, client_at(url) as client:
        sampler = client.create_sampling_client(base_model=NAME).result()
        named = types.TensorData.from_torch(torch.zeros(4, 1, dtype=torch.int64))
        prompt = types.ModelInput.from_ints(TEXTS[0])
        with pytest.raises(tinker.RequestFailedError, match="4 tokens, but 1 to 3 can be computed here"):
            sampler.sample(prompt, 1, GREEDY, target_prompt_logprobs=named).result()


def test_samples_of_one_prompt_are_drawn_together(client: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    generate = Engine.generate

    def counted(engine: Engine, request: Generation) -> Any:
        rows.append(request.n)
        return generate(engine, request)

    monkeypatch.setattr(Engine, "generate", counted)
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(TEXTS[1])
    params = types.SamplingParams(max_tokens=6, stop=[])
    calls = [sampler.sample(prompt, 1, params) for _ in range(8)]
    found = [call.result().sequences[0] for call in calls]
    assert sum(rows) == 8
    assert len(rows) < 8
    assert len({tuple(one.tokens) for one in found}) > 1
    for one in found:
        ids = torch.tensor([TEXTS[1] + one.tokens])
        wanted = plain(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[-6:, 0]
        assert one.logprobs == pytest.approx(wanted.tolist(), abs=5e-5)


def test_samples_are_drawn_while_a_step_is_computed(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trained(client, steps=1)
    sampler = training.save_weights_and_get_sampling_client().result()
    whole, begun, going_on = Tuner.compute, threading.Event(), threading.Event()

    def compute(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert going_on.wait(60)
        return whole(*arguments, **options)

    monkeypatch.setattr(Tuner, "compute", compute)
    call = training.forward_backward([datum(TEXTS[0])], "cross_entropy")
    try:
        assert begun.wait(60)
        prompt = types.ModelInput.from_ints(TEXTS[0])
        assert sampler.sample(prompt, 1, GREEDY).result().sequences
        assert sampler.compute_logprobs(prompt).result()
    finally:
        going_on.set()
    assert call.result()


def test_prompts_are_scored_together(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Generation] = []
    whole = Engine.generate

    def generate(engine: Engine, request: Generation) -> Any:
        drawn.append(request)
        return whole(engine, request)

    monkeypatch.setattr(Engine, "generate", generate)
    training = trained(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompts = [types.ModelInput.from_ints(ids) for ids in TEXTS]
    calls = [sampler.compute_logprobs(one) for one in prompts]
    forward = training.forward([datum(ids) for ids in TEXTS], "cross_entropy").result().loss_fn_outputs
    for ids, call, found in zip(TEXTS, calls, forward, strict=True):
        first, *others = call.result()
        assert first is None
        assert others == pytest.approx(found["logprobs"].data, abs=5e-5), ids
    assert drawn == []
    # The token after the prompt, as the engine draws it.
    params = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])
    kinds = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    scored, plain = (sampler.sample(prompts[1], 1, params, **more).result() for more in (kinds, {}))
    assert len(drawn) == 1
    (ours,), (theirs,) = scored.sequences, plain.sequences
    assert (ours.tokens, ours.stop_reason) == (theirs.tokens, theirs.stop_reason)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=5e-5)
    assert [len(one) for one in scored.topk_prompt_logprobs[1:]] == [2] * (len(TEXTS[1]) - 1)


def test_runs_of_two_keys_do_not_mix(url: str) -> None:
    with client_at(url, KEYS[0]) as anna, client_at(url, KEYS[1]) as ben:
        alone = trained(anna, steps=1).forward([datum(TEXTS[0])], "cross_entropy").result().metrics
        one, other = (
            each.create_lora_training_client(base_model=NAME, rank=4, seed=1).result() for each in (anna, ben)
        )
        calls = [
            each.forward_backward([datum(ids)], "cross_entropy")
            for ids, foreign in zip(TEXTS, reversed(TEXTS), strict=True)
            for each, ids in ((one, ids), (other, foreign[:2]))
        ]
        steps = [each.optim_step(types.AdamParams(learning_rate=0.02)) for each in (one, other)]
        assert all(call.result() for call in [*calls, *steps])
        assert one.forward([datum(TEXTS[0])], "cross_entropy").result().metrics == alone
        path = one.save_state("mine").result().path
        with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
            ben.create_training_client_from_state(path).result()


def test_what_cannot_be_is_said_at_once(url: str, client: Any) -> None:
    with pytest.raises(tinker.NotFoundError, match="this server has Org/Tiny"):
        client.create_lora_training_client(base_model="Org/Other").result()
    with pytest.raises(tinker.AuthenticationError, match="a wrong API key"), client_at(url, "tml-wrong"):
        pass
    with pytest.raises(tinker.RequestFailedError, match="a LoRA of rank 1000 cannot be trained here: 1 to 256"):
        client.create_lora_training_client(base_model=NAME, rank=1000).result()
    training = client.create_lora_training_client(base_model=NAME, rank=4).result()
    for text, loss, message in (
        (datum([5] * 4000), "cross_entropy", "3999 tokens, but 1 to"),
        (datum(TEXTS[0], weights=[1.0]), "cross_entropy", r"weights has shape \(1,\)"),
        (datum(TEXTS[0], logprobs=[0.0] * 4, advantages=[float("nan")] * 4), "ppo", "advantages is NaN"),
        (datum(TEXTS[0]), "stable_reinforce", "use loss_fn=importance_sampling"),
        (datum(TEXTS[0]), "huber", "unknown loss_fn 'huber': known are cross_entropy"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            training.forward_backward([text], loss).result()
        with pytest.raises(tinker.RequestFailedError, match="a forward_backward before it failed"):
            training.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward first"):
        training.optim_step(types.AdamParams()).result()
    # Its number is used up: what comes after it does not wait for it.
    with pytest.raises(tinker.RequestFailedError, match="learning_rate must be a finite number, 0 or more; got -1"):
        training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    image = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor([5]))},
    )
    with pytest.raises(tinker.RequestFailedError, match="this model reads tokens of text only"):
        training.forward([image], "cross_entropy").result()
    training.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    assert training.optim_step(types.AdamParams()).result()


def test_a_refused_step_leaves_nothing_for_the_next(url: str, client: Any) -> None:
    norms = []
    for rate in (-1e-9, 0.0):
        training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
        training.forward_backward([datum(TEXTS[0], reward=[9.0])], "cross_entropy").result()
        refused = error_of(training.optim_step(types.AdamParams(learning_rate=rate)))
        assert refused.count("learning_rate must be a finite number") == (rate < 0)
        training.forward_backward([datum(TEXTS[1], reward=[1.0])], "cross_entropy").result()
        norms.append(training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"])
    assert norms[0] == norms[1]
    runs = httpx2.get(f"{url}/api/v1/progress", headers={"X-API-Key": KEYS[0]}).json()["runs"]
    assert [[one["reward"] for one in run["points"]] for run in runs] == [[9.0, 1.0], [1.0]]


def test_weights_that_this_server_does_not_make_are_refused_in_their_turn(client: Any) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="weights are not encrypted here: leave out age_encryption_rec"):
        training.save_weights_external("out", age_encryption_recipients=["age1xyz"]).result()
    with pytest.raises(tinker.RequestFailedError, match="kind is 'inflight', but samplers keep their weights here"):
        training.save_weights_and_get_sampling_client(kind="inflight").result()
    # Their numbers are used up: what comes after them does not wait for them.
    assert training.save_weights_external("out").result()


def test_a_checkpoint_of_another_base_is_refused(plain: Any, tokenizer: Any, tiny: Path, tmp_path: Path) -> None:
    with serving(plain, tokenizer, tmp_path) as url, client_at(url) as client:
        training = client.create_lora_training_client(base_model=NAME, rank=2).result()
        paths = training.save_state("a").result().path, training.save_weights_for_sampler("b").result().path
        del training
    other = AutoModelForCausalLM.from_pretrained(tiny).eval()
    with serving(other, tokenizer, tmp_path) as url, client_at(url) as client:
        with pytest.raises(tinker.RequestFailedError, match=f"{paths[0]}.* was made for"):
            client.create_training_client_from_state(paths[0]).result()
        with pytest.raises(tinker.APIStatusError, match=f"{paths[1]}.* was made for") as raised:
            client.create_sampling_client(model_path=paths[1]).result()
        assert 400 <= raised.value.status_code < 500


def test_no_error_names_a_folder_of_the_server(client: Any, tmp_path: Path) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=2).result()
    path = training.save_weights_for_sampler("a").result().path
    error = error_of(client.create_training_client_from_state_with_optimizer(path))
    assert f"{path}/optimizer.safetensors" in error
    assert "load the weights alone" in error
    assert str(tmp_path) not in error


def error_of(call: Any) -> str:
    """Waits for a call; returns why it failed, empty if it did not."""
    try:
        call.result(timeout=120)
    except (tinker.APIStatusError, tinker.RequestFailedError, RetryableException) as exc:
        return str(exc)
    return ""


def test_a_client_of_a_server_that_starts_again_is_told_what_to_do(plain: Any, tokenizer: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as clients:
        with serving(plain, tokenizer, tmp_path) as url:
            client = clients.enter_context(client_at(url))
            training = trained(client, steps=1)
            path = training.save_state("one").result().path
            wanted = training.forward([datum(TEXTS[0])], "cross_entropy").result().metrics
            calls = [training.forward_backward([datum(ids)], "cross_entropy") for ids in TEXTS * 20]
        with serving(plain, tokenizer, tmp_path, port=int(url.rpartition(":")[2])):
            assert not any("internal error" in error_of(call) for call in calls)
            message = "make a new ServiceClient, and load your last checkpoint"
            assert message in error_of(training.forward_backward([datum(TEXTS[0])], "cross_entropy"))
            assert message in error_of(training.save_state("two"))
            del training
            again = clients.enter_context(client_at(url)).create_training_client_from_state_with_optimizer(path)
            assert again.result().forward([datum(TEXTS[0])], "cross_entropy").result().metrics == wanted
            del again
            clients.close()


def test_runs_and_checkpoints_are_listed(url: str, client: Any, rest: Any) -> None:
    training = trained(client, steps=1)
    run = training.model_id
    state = training.save_state("a", user_metadata={"note": "first"}).result().path
    sampler = training.save_weights_for_sampler("b", ttl_seconds=7200).result().path
    (known,) = rest.list_training_runs().result().training_runs
    assert (known.training_run_id, known.lora_rank, known.last_checkpoint.tinker_path) == (run, 4, state)
    assert rest.get_training_run(run).result().last_sampler_checkpoint.tinker_path == sampler
    listed = rest.list_checkpoints(run).result().checkpoints
    assert [one.tinker_path for one in listed] == [sampler, state]
    assert listed[1].user_metadata == {"note": "first"}
    assert listed[0].expires_at is not None
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (NAME, 4, True)
    found = client.create_sampling_client(model_path=sampler).result()
    prompt = types.ModelInput.from_ints(TEXTS[0])
    live = training.save_weights_and_get_sampling_client().result()
    assert found.sample(prompt, 1, GREEDY).result().sequences[0].tokens == (
        live.sample(prompt, 1, GREEDY).result().sequences[0].tokens
    )
    with client_at(url, KEYS[1], tinker.RestClient) as bens:
        assert not bens.list_training_runs().result().training_runs
        with pytest.raises(tinker.NotFoundError):
            bens.delete_checkpoint_from_tinker_path(state).result()
    with client_at(url, KEYS[1]) as ben:
        rest.publish_checkpoint_from_tinker_path(state).result()
        copied = ben.create_training_client_from_state(state).result()
        # Without the optimizer's state: weights alone.
        assert copied.forward([datum(TEXTS[0])], "cross_entropy").result().metrics == (
            training.forward([datum(TEXTS[0])], "cross_entropy").result().metrics
        )
        rest.unpublish_checkpoint_from_tinker_path(state).result()
        with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
            ben.create_training_client_from_state(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert rest.list_checkpoints(run).result().checkpoints[1].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints] == [sampler]


def test_what_is_trained_is_counted(url: str, client: Any) -> None:
    trained(client, steps=1)
    found = httpx2.get(f"{url}/metrics", headers={"X-API-Key": KEYS[0]}).text
    assert "swarm_api_training_models 1.0" in found
    assert "swarm_api_training_steps_total 1.0" in found
    assert "swarm_api_training_open_calls 0.0" in found
    assert f'swarm_api_training_tokens_total{{kind="forward_backward"}} {sum(map(len, TEXTS)) - 3}.0' in found


def test_a_run_is_seen_by_its_key(url: str, client: Any) -> None:
    training = trained(client, steps=1)
    for reward in (0.25, 0.75):
        training.forward_backward([datum(TEXTS[0], reward=[reward])], "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    anns, bens = (httpx2.get(f"{url}/api/v1/progress", headers={"X-API-Key": key}).json() for key in KEYS)
    (run,) = anns["runs"]
    assert bens["runs"] == []
    assert (run["num_steps"], run["rank"], anns["num_open"]) == (2, 4, 0)
    assert [(one["step"], one["reward"]) for one in run["points"]] == [(1, None), (2, 0.5)]
    assert all(one["loss"] > 0 and one["tokens_per_s"] > 0 for one in run["points"])
    # With other weights the plot begins anew: neither steps before them are theirs, nor calls that have had no step.
    path = training.save_state("here").result().path
    training.forward_backward([datum(TEXTS[0], reward=[9.0])], "cross_entropy").result()
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state(path).result()
    training.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    (run,) = httpx2.get(f"{url}/api/v1/progress", headers={"X-API-Key": KEYS[0]}).json()["runs"]
    assert [(one["step"], one["reward"]) for one in run["points"]] == [(1, None)]


def test_an_adapter_is_downloaded_without_a_key(client: Any, rest: Any, plain: Any, tmp_path: Path) -> None:
    training = trained(client, steps=1)
    path = training.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, address in urls.items():
        (folder / name).write_bytes(httpx2.get(address).raise_for_status().content)
    local = PeftModel.from_pretrained(plain, str(folder)).eval()
    found = training.forward([datum(ids) for ids in TEXTS], "cross_entropy").result().metrics["loss:sum"]
    assert sum(losses_of(local)) == pytest.approx(found, rel=1e-4)
    token = urls["adapter_config.json"].split("/")[-2]
    for other in (token[:-1], token):
        address = urls["adapter_config.json"].replace(token, other).replace("adapter_config", "checkpoint")
        assert httpx2.get(address).status_code == 404
