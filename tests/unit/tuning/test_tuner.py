"""A tuner's losses, gradients and steps against plain PEFT and torch; a checkpoint goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from type_models import tiny_type_config

from swarm_plugins.backbone.twin import twin
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, NumericError
from swarm_plugins.hub.adapter_settings import _HARMLESS_TYPES
from swarm_plugins.testing import save_tiny
from swarm_plugins.tuning import adapters
from swarm_plugins.tuning.adapters import new_adapter, new_lora
from swarm_plugins.tuning.checkpoints import CheckpointFacts, CheckpointStore, LoraShape, RunFacts
from swarm_plugins.tuning.datums import Datum, LossCall, TextBounds, check_datums
from swarm_plugins.tuning.optimizer_file import load_optimizer, save_optimizer
from swarm_plugins.tuning.snapshots import own_bytes, snapshot
from swarm_plugins.tuning.tuner import AdamParams, Tuner

RUN = f"{'0' * 32}:train:0"
CROSS_ENTROPY = LossCall.of("cross_entropy", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def texts(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 3)) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        ids = torch.randint(4, 128, (length + 1,), generator=generator)
        weights = torch.rand(length, generator=generator)
        found.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
    return found


def plain_loss(model: Any, datums: list[Datum]) -> Tensor:
    """Each text by itself, as one would write it."""
    losses = [
        functional.cross_entropy(model(datum.tokens[None]).logits[0], datum.inputs["target_tokens"], reduction="none")
        for datum in datums
    ]
    return torch.stack(
        [(loss * datum.inputs["weights"]).sum() for loss, datum in zip(losses, datums, strict=True)]
    ).sum()


def test_steps_are_those_of_peft_and_torch(base: Any) -> None:
    tuner = Tuner(new_lora(base, rank=4, seed=3))
    config = tuner.model.peft_config["default"]
    plain = get_peft_model(
        twin(base),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=config.lora_alpha,
            target_modules=config.target_modules,
            target_parameters=config.target_parameters,
        ),
    )
    plain.load_state_dict(tuner.model.state_dict())
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for number in range(3):
        first, second = texts(2 * number), texts(2 * number + 1, (7,))
        loss = plain_loss(plain, first) + plain_loss(plain, second)
        loss.backward()
        found = sum(
            one.losses.sum() for part in (first, second) for one in tuner.compute(part, CROSS_ENTROPY, backward=True)
        )
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        metrics = tuner.step(AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=0.5))
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(tuner.parameters.values(), trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_forward_alone_leaves_no_gradient(base: Any) -> None:
    tuner = Tuner(new_lora(base, rank=2, seed=0))
    tuner.compute(texts(), CROSS_ENTROPY, backward=False)
    assert all(parameter.grad is None for parameter in tuner.parameters.values())
    with pytest.raises(ConfigError, match="call forward_backward first"):
        tuner.step(AdamParams())


def test_long_batches_are_cut(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(new_lora(base, rank=2, seed=0))
    datums = texts(lengths=(3, 12, 4, 11, 5))
    whole = tuner.compute(datums, CROSS_ENTROPY, backward=True)
    gradients = [parameter.grad.clone() for parameter in tuner.parameters.values() if parameter.grad is not None]
    tuner.optimizer.zero_grad()
    monkeypatch.setattr("swarm_plugins.tuning.computing._MAX_BATCH_TOKENS", 12)
    parts = tuner.compute(datums, CROSS_ENTROPY, backward=True)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)
    for before, after in zip(gradients, (one.grad for one in tuner.parameters.values()), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-3, atol=1e-5)


def test_a_call_that_nobody_wants_any_more_ends_after_a_batch(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.tuning.computing._MAX_BATCH_TOKENS", 12)
    tuner, stop, batches = Tuner(new_lora(base, rank=2, seed=0)), threading.Event(), list[int]()

    def leave(module: Any, inputs: Any, output: Any) -> None:
        batches.append(len(output.logits))
        stop.set()

    tuner.model.register_forward_hook(leave)
    with pytest.raises(CancelledError):
        tuner.compute(texts(lengths=(12, 11, 10)), CROSS_ENTROPY, backward=True, stop=stop)
    assert batches == [1]
    with pytest.raises(ConfigError, match="a forward_backward before it failed"):
        tuner.step(AdamParams())


def test_the_same_seed_is_the_same_start(base: Any) -> None:
    first, second, other = (Tuner(new_lora(base, rank=4, seed=seed)) for seed in (1, 1, 2))
    pairs = list(zip(first.parameters.values(), second.parameters.values(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)
    assert any(
        not torch.equal(one, two) for one, two in zip(first.parameters.values(), other.parameters.values(), strict=True)
    )


class _Noted:
    """A lock that sets an event when somebody has to wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self._lock = threading.Lock()
        self._waits = waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_seed_is_the_same_start_while_another_model_is_made(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Tuner(new_lora(base, rank=2, seed=1)).parameters
    goes_on, is_made = threading.Event(), threading.Event()
    others: list[Future[Any]] = []

    def made(*given: Any) -> Any:
        if not others:  # the first one, whose seed is set
            others.append(threads.submit(new_lora, base, rank=2, seed=2))
            assert goes_on.wait(60)
        elif not is_made.is_set():  # the other one has set its own meanwhile
            goes_on.set()
            assert is_made.wait(60)
        return get_peft_model(*given)

    monkeypatch.setattr(adapters, "DRAWING", _Noted(goes_on))
    monkeypatch.setattr(adapters, "get_peft_model", made)
    with ThreadPoolExecutor(1) as threads:
        found = Tuner(new_lora(base, rank=2, seed=1)).parameters
        is_made.set()
        others[0].result(60)
    assert all(torch.equal(one, found[name]) for name, one in wanted.items())


@pytest.mark.parametrize(
    ("parts", "wanted", "unwanted"),
    [
        ({"mlp": False, "unembed": False}, "self_attn", ("experts", "lm_head")),
        ({"attention": False, "unembed": False}, "experts", ("self_attn", "lm_head")),
        ({"attention": False, "mlp": False}, "lm_head", ("self_attn", "experts")),
    ],
)
def test_what_is_adapted(base: Any, parts: dict[str, Any], wanted: str, unwanted: tuple[str, ...]) -> None:
    names = Tuner(new_lora(base, rank=2, **parts)).parameters
    assert any(wanted in name for name in names)
    assert not [name for name in names for other in (*unwanted, "router", "mlp.gate.") if other in name]


@pytest.mark.parametrize(
    ("model_type", "mixers", "mlps"),
    [
        ("mamba", "in_proj x_proj", ""),
        ("mamba2", "in_proj", ""),
        ("falcon_mamba", "in_proj x_proj", ""),
        ("falcon_h1", "mamba.in_proj q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"),
        (
            "nemotron_h",
            "in_proj q_proj k_proj v_proj o_proj",
            "mixer.up_proj mixer.down_proj shared_experts.up_proj shared_experts.down_proj experts",
        ),
        ("lfm2", "conv.in_proj conv.out_proj q_proj k_proj v_proj out_proj", "w1 w2 w3"),
        ("recurrent_gemma", "linear_x linear_y linear_out q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"),
    ],
)
def test_what_is_adapted_in_hybrids(model_type: str, mixers: str, mlps: str) -> None:
    base: Any = AutoModelForCausalLM.from_config(tiny_type_config(model_type)).eval()
    for flag, wanted in (("attention", mixers), ("mlp", mlps), ("unembed", "lm_head")):
        parts = dict.fromkeys(("attention", "mlp", "unembed"), False) | {flag: True}
        if not wanted:
            with pytest.raises(ConfigError, match="no module would be trained"):
                new_lora(base, rank=2, **parts)
            continue
        adapted = {
            re.sub(r"(\.base_layer)*\.lora_[AB].*", "", one)
            for one in Tuner(new_lora(base, rank=2, **parts)).parameters
        }
        assert {end for name in adapted for end in wanted.split() if name.endswith(f".{end}")} == set(wanted.split())
        assert all(name.endswith(tuple(f".{end}" for end in wanted.split())) for name in adapted)


def test_what_peft_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_WITHOUT_OUT_PROJ", set())
    base = AutoModelForCausalLM.from_config(tiny_type_config("mamba2"))
    with pytest.raises(ConfigError, match=r"^a LoRA of rank 2 does not fit this model .*'out_proj' is incompatible"):
        new_lora(base, rank=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "LORA", "target_modules": ["q_proj", "o_proj"], "inference_mode": True},
        {"peft_type": "LORA", "target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
        {"peft_type": "LOKR", "target_modules": ["q_proj"]},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
        {"peft_type": "P_TUNING", "num_virtual_tokens": 3, "encoder_reparameterization_type": "LSTM"},
    ],
    ids=lambda settings: settings["peft_type"],
)
def test_an_adapter_is_counted_before_it_is_made(base: Any, settings: dict[str, Any]) -> None:
    counted: list[int] = []
    model = new_adapter(base, json.dumps(settings), check=counted.append)
    assert counted == [own_bytes(model, base)]
    lora = new_lora(base, rank=3, check=counted.append)
    assert counted[1] == own_bytes(lora, base)


@pytest.mark.parametrize("kind", _HARMLESS_TYPES)
def test_a_config_that_peft_saved_is_trained(base: Any, kind: str, tmp_path: Path) -> None:
    settings = {"num_virtual_tokens": 2} if "TUNING" in kind else {"target_modules": ["q_proj"]}
    settings |= {"feedforward_modules": []} if kind == "IA3" else {}
    saved = get_peft_model(twin(base), PEFT_TYPE_TO_CONFIG_MAPPING[kind](**settings, task_type="CAUSAL_LM"))
    saved.save_pretrained(tmp_path)  # which says inference_mode=true
    tuner = Tuner(new_adapter(base, (tmp_path / "adapter_config.json").read_text()))
    assert tuner.parameters.keys() == {name for name, one in saved.named_parameters() if one.requires_grad}


def test_what_is_too_large_is_not_made(base: Any) -> None:
    def check(num_bytes: int) -> None:
        assert num_bytes > 1 << 40  # no machine of tests has so much
        raise CapacityError(f"{num_bytes} bytes")

    encoder = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 1 << 14, "encoder_num_layers": 64}
    settings = {"peft_type": "P_TUNING", "num_virtual_tokens": 3, **encoder}
    with pytest.raises(CapacityError):
        new_adapter(base, json.dumps(settings), check=check)


def test_a_prompt_that_names_a_tokenizer_is_refused(base: Any) -> None:
    settings = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2, "prompt_tuning_init": "TEXT"}
    settings |= {"prompt_tuning_init_text": "sort", "tokenizer_name_or_path": "/etc"}
    with pytest.raises(ConfigError, match="use prompt_tuning_init='RANDOM' or 'SAMPLE_VOCAB'"):
        new_adapter(base, json.dumps(settings))


def test_a_failed_call_refuses_one_step(base: Any) -> None:
    tuner = Tuner(new_lora(base, rank=2, seed=0))
    before = {name: parameter.clone() for name, parameter in tuner.parameters.items()}
    tuner.compute(texts(), CROSS_ENTROPY, backward=True)
    bad = Datum(torch.tensor([5, 6]), {"target_tokens": torch.tensor([6, 7]), "weights": torch.tensor([1e38, 1e38])})
    with pytest.raises(NumericError, match="the loss is NaN or infinite"):
        tuner.compute([bad, bad], LossCall.of("cross_entropy", {}), backward=True)
    with pytest.raises(ConfigError, match="a forward_backward before it failed"):
        tuner.step(AdamParams())
    assert all(torch.equal(before[name], parameter) for name, parameter in tuner.parameters.items())
    tuner.compute(texts(), CROSS_ENTROPY, backward=True)
    tuner.step(AdamParams())


def test_a_snapshot_stays_as_it_was(base: Any) -> None:
    tuner = Tuner(new_lora(base, rank=2, seed=0))
    kept, ids = snapshot(tuner.model), torch.tensor([[5, 6, 7]])
    before = kept(ids).logits
    tuner.compute(texts(), CROSS_ENTROPY, backward=True)
    tuner.step(AdamParams(learning_rate=0.1))
    assert torch.equal(kept(ids).logits, before)
    assert not torch.equal(tuner.model(ids).logits, before)
    assert kept.get_input_embeddings().weight is base.get_input_embeddings().weight


def facts(owner: str = "") -> RunFacts:
    return RunFacts(run=RUN, owner=owner, base="tiny", lora=LoraShape(rank=2), started=1.0)


def test_a_checkpoint_goes_on_exactly(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    for number in range(2):
        tuner.compute(texts(number), CROSS_ENTROPY, backward=True)
        tuner.step(AdamParams(learning_rate=0.01))
    path = store.save(tuner, facts(), "weights", "two").path
    _, _, folder = store.find(path, "")
    again = Tuner(load_adapter(twin(base), folder, is_trainable=True, is_shared=True).eval())
    load_optimizer(again, folder)
    for one in (tuner, again):
        one.compute(texts(5), CROSS_ENTROPY, backward=True)
        one.step(AdamParams(learning_rate=0.01))
    assert tuner.num_steps == again.num_steps == 3
    assert tuner.parameters.keys() == again.parameters.keys()
    assert all(torch.equal(one, again.parameters[name]) for name, one in tuner.parameters.items())


def test_tensors_that_missed_steps_go_on_exactly(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    never, late = list(tuner.parameters)[:2]

    def step(one: Tuner, number: int, without: tuple[str, ...]) -> None:
        one.compute(texts(number), CROSS_ENTROPY, backward=True)
        for name in without:
            one.parameters[name].grad = None
        one.step(AdamParams(learning_rate=0.01))

    step(tuner, 0, (never, late))
    step(tuner, 1, (never,))
    _, _, folder = store.find(store.save(tuner, facts(), "weights", "two").path, "")
    again = Tuner(load_adapter(twin(base), folder, is_trainable=True, is_shared=True).eval())
    load_optimizer(again, folder)
    for one in (tuner, again):
        step(one, 2, ())
    assert again.optimizer.state[again.parameters[late]]["step"] == 2
    assert again.optimizer.state[again.parameters[never]]["step"] == 1
    assert all(torch.equal(one, again.parameters[name]) for name, one in tuner.parameters.items())


def test_checkpoints_are_listed_and_go(base: Any, tmp_path: Path) -> None:
    now = [100.0]
    store = CheckpointStore(tmp_path, clock=lambda: now[0])
    tuner = Tuner(new_lora(base, rank=2, seed=0, attention=False, mlp=False))
    store.add_run(facts("anna"))
    lasting = store.save(tuner, facts("anna"), "weights", "a")
    passing = store.save(tuner, facts("anna"), "sampler_weights", "b", ttl_s=60)
    assert [one.path for one in store.checkpoints(RUN)] == [lasting.path, passing.path]
    assert [one.run for one in store.runs("anna")] == [RUN]
    assert not store.runs("ben")
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        store.find(lasting.path, "ben")
    with pytest.raises(ConfigError, match="give another name, or overwrite=True"):
        store.save(tuner, facts("anna"), "weights", "a")
    assert store.save(tuner, facts("anna"), "weights", "a", overwrite=True).num_bytes == lasting.num_bytes
    now[0] = 161.0
    assert [one.name for one in store.checkpoints(RUN)] == ["a"]
    store.save(tuner, facts("anna"), "weights", "c", ttl_s=60)
    now[0] = 222.0
    assert store.save(tuner, facts("anna"), "weights", "c").saved == 222.0  # the name is free again
    store.delete(store.find(f"tinker://{RUN}/weights/c", "anna")[0])
    store.delete(lasting)
    assert not store.checkpoints(RUN)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["run.json"]


@pytest.mark.parametrize("name", ["", ".x", "../x", "a/b", "x" * 129, "é"])
def test_no_name_leads_out_of_the_folder(base: Any, tmp_path: Path, name: str) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    with pytest.raises(ConfigError):
        store.save(tuner, facts(), "weights", name)
    with pytest.raises(ConfigError):
        store.find(f"tinker://{RUN}/weights/{name}", "")
    with pytest.raises(ConfigError):
        store.find(f"tinker://{name}/weights/x", "")


def test_checkpoints_are_bounded(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path, max_bytes_per_owner=1000), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    with pytest.raises(CapacityError, match="delete some, or save with ttl_seconds"):
        store.save(tuner, facts(), "weights", "a")


def test_the_moments_of_an_optimizer_count_before_they_are_written(base: Any, tmp_path: Path) -> None:
    tuner = Tuner(new_lora(base, rank=2, seed=0))
    adapter_bytes = sum(one.nbytes for one in tuner.parameters.values())
    store = CheckpointStore(tmp_path, max_bytes_per_owner=3 * adapter_bytes - 1)
    store.add_run(facts())
    with pytest.raises(CapacityError, match="delete some, or save with ttl_seconds"):
        store.save(tuner, facts(), "weights", "a")
    store.save(tuner, facts(), "sampler_weights", "a")


def test_checkpoints_of_runs_that_nobody_looks_at_expire(base: Any, tmp_path: Path) -> None:
    now = [100.0]
    store, tuner = CheckpointStore(tmp_path, clock=lambda: now[0]), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    store.save(tuner, facts(), "weights", "a", ttl_s=60)
    other = CheckpointStore(tmp_path, clock=lambda: now[0])
    other.drop_expired()
    assert list(tmp_path.rglob("checkpoint.json"))
    now[0] = 161.0
    other.drop_expired()
    assert not list((tmp_path / "runs").iterdir())
    store.save(tuner, facts(), "weights", "b")  # its run goes on
    assert [one.run for one in other.runs("")] == [RUN]


def test_a_checkpoint_on_its_way_to_the_hub_is_not_replaced(base: Any, tmp_path: Path) -> None:
    on_its_way: list[Path] = []
    store, tuner = CheckpointStore(tmp_path, on_its_way.__contains__), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    saved = store.save(tuner, facts(), "weights", "a")
    on_its_way.append(store.folder(saved))
    for is_there in (True, False):
        with pytest.raises(ConfigError, match="weights/a is on its way to the Hub: give another name, or try again"):
            store.save(tuner, facts(), "weights", "a", overwrite=True)
        if is_there:
            store.delete(saved)
    on_its_way.clear()
    store.save(tuner, facts(), "weights", "a")


@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_an_eps_that_makes_weights_nan_is_refused(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"eps must be at least 1e-37, got .*would become NaN"):
        AdamParams(eps=eps)


def test_a_run_without_checkpoints_is_forgotten(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path, max_per_owner=1), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    saved = store.save(tuner, facts(), "weights", "a")
    with pytest.raises(CapacityError, match="you have 1 checkpoints"):
        store.save(tuner, facts(), "weights", "b")
    saved = store.save(tuner, facts(), "weights", "a", overwrite=True)  # in its own place
    store.end_run(RUN)
    assert store.runs("")
    store.delete(saved)
    store.end_run(RUN)
    assert not store.runs("")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "expired"])
def test_a_run_that_has_ended_goes_with_its_last_checkpoint(base: Any, tmp_path: Path, is_deleted: bool) -> None:
    now = [100.0]
    store, tuner = CheckpointStore(tmp_path, clock=lambda: now[0]), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    for kind in ("weights", "sampler_weights"):
        store.save(tuner, facts(), kind, "a", ttl_s=60)
    store.end_run(RUN)
    # After a restart, no run is in training.
    store = CheckpointStore(tmp_path, clock=lambda: now[0])
    first, last = store.checkpoints(RUN)
    store.delete(first)
    assert store.runs("")
    if is_deleted:
        store.delete(last)
    else:
        now[0] = 161.0
        assert not store.checkpoints(RUN)
    assert not store.runs("")
    assert not list((tmp_path / "runs").iterdir())


def test_hundreds_of_checkpoints_expire_at_once(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).add_run(facts())
    for number in range(300):  # more than calls can be within each other, a few for each
        one = CheckpointFacts(run=RUN, kind="weights", name=f"{number}", step=1, saved=1.0, expires=2.0)
        folder = tmp_path / "runs" / RUN / one.kind / one.name
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_bytes(msgspec.json.encode(one))
    store = CheckpointStore(tmp_path, clock=lambda: 3.0)
    assert not store.checkpoints(RUN)
    assert not store.runs("")
    assert not list((tmp_path / "runs").iterdir())


def test_a_checkpoint_of_a_run_that_ends_meanwhile_is_not_kept(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())

    def check(*asked: Any) -> None:
        store.end_run(RUN)

    monkeypatch.setattr(store, "_check_room", check)
    with pytest.raises(CheckpointError, match="was not kept: its run has ended meanwhile"):
        store.save(tuner, facts(), "weights", "a")
    assert not list((tmp_path / "runs").iterdir())


def test_what_a_killed_process_has_left_goes_at_the_start(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    other = RUN.replace("0", "1")
    for run in (RUN, other):
        store.add_run(msgspec.structs.replace(facts(), run=run))
    for name in "ab":
        store.save(tuner, facts(), "weights", name)
    folder = tmp_path / "runs" / RUN / "weights"
    replaced, taken = (folder / f".part-{number}" / "old" for number in "12")
    for old, name in ((replaced, "a"), (taken, "b")):  # killed before the second rename, and after it
        shutil.copytree(folder / name, old)
    shutil.rmtree(folder / "a")
    (folder / ".part-3" / "new").mkdir(parents=True)
    (folder / ".gone-4").mkdir()
    (tmp_path / "runs" / other / "weights" / ".part-5").mkdir(parents=True)
    CheckpointStore(tmp_path).start()
    assert [one.run for one in store.runs("")] == [RUN]
    assert sorted(one.name for one in store.checkpoints(RUN)) == ["a", "b"]
    assert sorted(one.name for one in folder.iterdir()) == ["a", "b"]


def test_what_another_process_is_about_to_save_stays(tmp_path: Path) -> None:
    used, late = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    used.start()
    used.add_run(facts())
    late.start()
    assert late.runs("")
    del used
    CheckpointStore(tmp_path).start()
    assert late.runs("")  # it may have runs of its own
    del late
    last = CheckpointStore(tmp_path)
    last.start()
    assert not last.runs("")


def test_two_saves_at_once_share_the_room(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, max_per_owner=1)
    store.add_run(facts())
    tuners = [Tuner(new_lora(base, rank=2, seed=0)) for _ in range(2)]
    checked, check = threading.Barrier(2), store._check_room

    def both(*asked: Any) -> None:
        check(*asked)
        with contextlib.suppress(threading.BrokenBarrierError):
            checked.wait(0.1)  # until both are checked, if they can be

    monkeypatch.setattr(store, "_check_room", both)
    with ThreadPoolExecutor(2) as threads:
        saves = [
            threads.submit(store.save, tuner, facts(), "weights", name)
            for tuner, name in zip(tuners, "ab", strict=True)
        ]
    assert sorted(type(save.exception()).__name__ for save in saves) == ["CapacityError", "NoneType"]


def test_a_run_that_ends_waits_for_its_last_checkpoint(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    with ThreadPoolExecutor(1) as threads:

        def check(*asked: Any) -> None:
            wait([threads.submit(store.end_run, RUN)], 0.1)  # until it has ended, if it can

        monkeypatch.setattr(store, "_check_room", check)
        saved = store.save(tuner, facts(), "weights", "a")
    assert store.checkpoints(RUN) == [saved]
    assert store.runs("")


def test_the_optimizer_goes_on_where_the_parameters_are(tmp_path: Path) -> None:
    stepped, resumed = Tuner(nn.Linear(2, 2)), Tuner(nn.Linear(2, 2, device="meta"))
    for tuner in (stepped, resumed):
        for parameter in tuner.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    stepped.optimizer.step()
    save_optimizer(stepped, tmp_path)
    load_optimizer(resumed, tmp_path)
    resumed.optimizer.step()
    for state in resumed.optimizer.state.values():
        assert {name: one.device.type for name, one in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_the_optimizer_of_another_adapter_is_refused(base: Any, tmp_path: Path) -> None:
    store, tuner = CheckpointStore(tmp_path), Tuner(new_lora(base, rank=2, seed=0))
    store.add_run(facts())
    tuner.compute(texts(), CROSS_ENTROPY, backward=True)
    tuner.step(AdamParams())
    _, _, folder = store.find(store.save(tuner, facts(), "weights", "a").path, "")
    with pytest.raises(CheckpointError, match="another shape"):
        load_optimizer(Tuner(new_lora(base, rank=3, seed=0)), folder)
    with pytest.raises(CheckpointError, match="which the adapter lacks"):
        load_optimizer(Tuner(new_lora(base, rank=2, seed=0, mlp=False)), folder)
    _, _, folder = store.find(store.save(tuner, facts(), "sampler_weights", "a").path, "")
    with pytest.raises(CheckpointError, match="load the weights alone"):
        load_optimizer(tuner, folder)


IDS = torch.tensor([5, 6, 7])


def test_texts_of_a_call_are_bounded() -> None:
    texts = [Datum(IDS, {"target_tokens": IDS})] * 3
    check_datums(texts, CROSS_ENTROPY, TextBounds(context=8, vocabulary=128, max_texts=3))
    with pytest.raises(ConfigError, match="3 texts in one call, at most 2 are possible: cut it"):
        check_datums(texts, CROSS_ENTROPY, TextBounds(context=8, vocabulary=128, max_texts=2))


@pytest.mark.parametrize(
    ("tokens", "inputs", "name", "message"),
    [
        (IDS[:0], {"target_tokens": IDS[:0]}, "cross_entropy", "0 tokens, but 1 to 8 can be computed here"),
        (torch.full((9,), 5), {"target_tokens": torch.full((9,), 5)}, "cross_entropy", "9 tokens"),
        (IDS, {}, "cross_entropy", "missing: target_tokens"),
        (IDS, {"target_tokens": IDS}, "ppo", "missing: logprobs, advantages"),
        (IDS, {"target_tokens": IDS[:2]}, "cross_entropy", r"give \[3\]"),
        (IDS, {"target_tokens": IDS, "weights": torch.ones(2)}, "cross_entropy", r"weights has shape \(2,\)"),
        (IDS, {"target_tokens": IDS, "weights": torch.tensor([1, float("nan"), 1])}, "cross_entropy", "weights is NaN"),
        (IDS, {"target_tokens": IDS + 1000}, "cross_entropy", "outside of the vocabulary, 0 to 127"),
        (IDS - 9, {"target_tokens": IDS}, "cross_entropy", "outside of the vocabulary"),
        (IDS, {"target_tokens": IDS.float()}, "cross_entropy", "must be whole numbers"),
        (IDS, {"target_tokens": IDS.view(3, 1).repeat(1, 65)}, "cross_entropy", "K from 1 to 64"),
        (
            IDS,
            {"target_tokens": IDS.new_zeros(3, 0), "logprobs": torch.zeros(3, 0)},
            "reverse_kl",
            r"shape \(3, 0\).*K from 1 to 64",
        ),
    ],
)
def test_texts_are_checked(tokens: Tensor, inputs: dict[str, Tensor], name: str, message: str) -> None:
    good = Datum(IDS, {"target_tokens": IDS, "logprobs": torch.zeros(3), "advantages": torch.ones(3)})
    with pytest.raises(ConfigError, match=f"datum 1 of 2: .*{message}"):
        check_datums([good, Datum(tokens, inputs)], LossCall.of(name, {}), TextBounds(context=8, vocabulary=128))
