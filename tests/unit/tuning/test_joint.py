"""Calls of several models in one pass over the base: what each gets is what it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.twin import twin
from swarm_plugins.errors import ConfigError, NumericError
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.testing import InProcessSwarm, save_tiny
from swarm_plugins.tuning.adapters import new_adapter, new_lora
from swarm_plugins.tuning.computing import Computed
from swarm_plugins.tuning.datums import Datum, LossCall
from swarm_plugins.tuning.joint import Call, Joint
from swarm_plugins.tuning.tuner import AdamParams, Tuner

CROSS_ENTROPY = LossCall.of("cross_entropy", {})
SAMPLING = LossCall.of("importance_sampling", {})


def text(seed: int, length: int) -> Datum:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 128, (length + 1,), generator=generator)
    logprobs, advantages, weights = torch.rand(3, length, generator=generator)
    inputs = {"target_tokens": ids[1:], "logprobs": -logprobs, "advantages": advantages, "weights": weights}
    return Datum(ids[:-1], inputs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("joint")
    return {family: save_tiny(family, root / family) for family in ("llama", "mixtral")}


@pytest.fixture(scope="module")
def swarm(folders: dict[str, Path]) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(folders["mixtral"]) as one:
        yield one


@pytest.fixture(scope="module", params=["memory", "offloaded", "swarm"])
def base(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    if request.param == "memory":  # where PEFT adapts no experts by row
        return AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    if request.param == "offloaded":
        offload = OffloadConfig(fast_bytes=1 << 20)
        return AutoSwarmModelForCausalLM.from_pretrained(folders["mixtral"], offload=offload).eval()
    connection = request.getfixturevalue("swarm").connection
    return AutoSwarmModelForCausalLM.from_pretrained(folders["mixtral"], connection=connection).eval()


def tuners(base: Any) -> list[Tuner]:
    """Three models of different ranks and modules, which have made a step: the second factors are not zero."""
    shapes: list[dict[str, Any]] = [{"rank": 2}, {"rank": 4, "unembed": False}, {"rank": 3, "attention": False}]
    found = [Tuner(new_lora(base, seed=seed, **shape)) for seed, shape in enumerate(shapes)]
    for tuner in found:
        tuner.compute([text(9, 6)], CROSS_ENTROPY, backward=True)
        tuner.step(AdamParams(learning_rate=0.02))
    return found


def calls_of(models: list[Tuner]) -> list[Call]:
    return [
        Call(models[0], [text(1, 5), text(2, 9)], CROSS_ENTROPY),
        Call(models[1], [text(3, 4)], SAMPLING),
        Call(models[2], [text(4, 9), text(5, 2), text(6, 7)], CROSS_ENTROPY),
    ]


def gradients(tuner: Tuner) -> list[Tensor]:
    found = [one.grad.clone() for one in tuner.parameters.values() if one.grad is not None]
    tuner.optimizer.zero_grad()
    return found


def assert_alike(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        # Batches of other sizes: torch sums in another order.
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-5, atol=2e-6)


def test_together_is_as_apart(base: Any) -> None:
    models = tuners(base)
    apart = [call.tuner.compute(call.datums, call.loss, backward=True) for call in calls_of(models)]
    wanted = [gradients(tuner) for tuner in models]
    joint = Joint(base)
    assert all(map(joint.can_take, models))
    together = joint.compute(calls_of(models), backward=True)
    for one, other in zip(together, apart, strict=True):
        assert_alike(one, other)
    for tuner, theirs in zip(models, wanted, strict=True):
        mine = gradients(tuner)
        assert len(mine) == len(theirs) == len(tuner.parameters)
        for gradient, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    # Tensors are shared: a pass after a step sees it, and each still trains its own.
    joint.compute(calls_of(models)[:2], backward=True)
    models[0].step(AdamParams(learning_rate=0.05))
    alone = models[0].compute([text(1, 5)], CROSS_ENTROPY, backward=False)
    (found, _) = joint.compute([Call(models[0], [text(1, 5)], CROSS_ENTROPY), calls_of(models)[1]], backward=False)
    assert_alike(found, alone)
    assert all(one.grad is None for one in models[0].parameters.values())


def test_servers_get_one_request_for_all(
    folders: dict[str, Path], swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoSwarmModelForCausalLM.from_pretrained(folders["mixtral"], connection=swarm.connection).eval()
    asked: list[Scheduler] = []
    train = Scheduler.train

    async def counted(scheduler: Scheduler, *args: Any, **options: Any) -> Any:
        asked.append(scheduler)
        return await train(scheduler, *args, **options)

    monkeypatch.setattr(Scheduler, "train", counted)
    models = tuners(base)
    joint = Joint(base)
    asked.clear()
    joint.compute(calls_of(models), backward=True)
    assert len(asked) == 4  # forward and backward at each of the two servers
    for call in calls_of(models):
        call.tuner.compute(call.datums, call.loss, backward=True)
    assert len(asked) == 4 + 3 * 4


def test_a_fault_stays_with_its_call(base: Any) -> None:
    models = tuners(base)
    sound, odd, other = calls_of(models)
    wanted = sound.tuner.compute(sound.datums, sound.loss, backward=True)
    theirs = gradients(sound.tuner)
    inputs = {**odd.datums[0].inputs, "logprobs": torch.full((4,), -1e4)}  # a ratio beyond all bounds
    odd = Call(odd.tuner, [Datum(odd.datums[0].tokens, inputs)], odd.loss)
    found = Joint(base).compute([sound, odd, other], backward=True)
    assert_alike(found[0], wanted)
    assert isinstance(found[1], NumericError)
    for one, two in zip(gradients(sound.tuner), theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="a forward_backward before it failed"):
        odd.tuner.step(AdamParams())


def test_a_pass_that_breaks_is_computed_apart(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tuners(base)
    calls = calls_of(models)
    models[0].compute([text(8, 3)], CROSS_ENTROPY, backward=True)
    earlier = [one.grad.clone() for one in models[0].parameters.values() if one.grad is not None]

    def broken(model: Any, parts: Any, *, backward: bool) -> list[list[Computed]]:
        for tuner in models:
            for one in tuner.parameters.values():
                one.grad = torch.ones_like(one)  # of a backward that stopped on its way
        raise RuntimeError("a server is gone")

    monkeypatch.setattr("swarm_plugins.tuning.joint.run_pass", broken)
    found = Joint(base).compute(calls, backward=True)
    assert not any(isinstance(one, Exception) for one in found)
    mine = gradients(models[0])
    models[0].compute(calls[0].datums, calls[0].loss, backward=True)
    for one, before, added in zip(mine, earlier, gradients(models[0]), strict=True):
        torch.testing.assert_close(one, before + added, rtol=1e-5, atol=1e-6)


def test_after_a_pass_that_breaks_rows_take_their_own_adapters(folders: dict[str, Path], swarm: InProcessSwarm) -> None:
    base = AutoSwarmModelForCausalLM.from_pretrained(folders["mixtral"], connection=swarm.connection).eval()
    models = tuners(base)
    first, second = (Call(models[number], [text(number, 6)], CROSS_ENTROPY) for number in range(2))
    alone = [call.tuner.compute(call.datums, call.loss, backward=False) for call in (second, first)]
    joint = Joint(base)

    def broken(*_: Any) -> None:
        raise RuntimeError("a server is gone")

    hook = joint._with(models[:2]).model.get_output_embeddings().register_forward_pre_hook(broken)
    assert not any(isinstance(one, Exception) for one in joint.compute([first, second], backward=False))
    hook.remove()
    assert not joint._copy.names  # where PEFT has left its hooks
    for one, wanted in zip(joint.compute([second, first], backward=False), alone, strict=True):
        assert_alike(one, wanted)


def test_what_has_no_rows(folders: dict[str, Path]) -> None:
    dense = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    mixture = AutoModelForCausalLM.from_pretrained(folders["mixtral"]).eval()
    joint = Joint(mixture)
    assert joint.can_take(Tuner(new_lora(mixture, rank=2, mlp=False)))
    assert not joint.can_take(Tuner(new_lora(mixture, rank=2)))  # PEFT adds to the whole weight of experts
    for settings in (
        '{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}',
        '{"peft_type": "LORA", "r": 2, "use_dora": true, "target_modules": ["q_proj"]}',
        '{"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj"]}',
    ):
        assert not Joint(dense).can_take(Tuner(new_adapter(dense, settings)))


@pytest.mark.parametrize("number", [1, 2], ids=["forward", "backward"])
def test_a_server_killed_within_a_call_costs_a_replay(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with InProcessSwarm(folders["mixtral"], spans=[(0, 2), (2, 4), (2, 4)]) as swarm:
        base = AutoSwarmModelForCausalLM.from_pretrained(folders["mixtral"], connection=swarm.connection).eval()
        models = tuners(base)
        joint = Joint(base)
        undisturbed = joint.compute(calls_of(models), backward=True)
        wanted = [gradients(tuner) for tuner in models]
        train = Scheduler.train
        replicas = {id(swarm.services[peer].scheduler): peer for peer in swarm.peers[1:]}
        asked: list[str] = []
        killing: list[asyncio.Task[None]] = []

        async def dying(scheduler: Scheduler, *args: Any, **options: Any) -> Any:
            answer = await train(scheduler, *args, **options)
            if id(scheduler) in replicas:
                asked.append(replicas[id(scheduler)])
                if len(asked) == number:
                    killing.append(asyncio.create_task(swarm.transport.kill(asked[-1])))
                    await asyncio.Event().wait()  # until it is cancelled, before its answer is sent
            return answer

        monkeypatch.setattr(Scheduler, "train", dying)
        found = joint.compute(calls_of(models), backward=True)
        assert len(set(asked)) == 2
        for one, other in zip(found, undisturbed, strict=True):
            assert not isinstance(one, Exception)
            assert not isinstance(other, Exception)
            assert all(torch.equal(mine.losses, theirs.losses) for mine, theirs in zip(one, other, strict=True))
        for tuner, theirs in zip(models, wanted, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(gradients(tuner), theirs, strict=True))


def dense_base(folders: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()


def test_models_are_forgotten_while_the_copy_is_made(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop forgets at any time, also while a thread puts adapters into the copy."""
    base = dense_base(folders)
    models, joint, made = tuners(base), Joint(base), twin(base)

    def forgotten(model: Any) -> Any:
        joint.clear()
        return made

    monkeypatch.setattr("swarm_plugins.tuning.joint.twin", forgotten)
    found = joint.compute(calls_of(models)[:2], backward=False)
    assert not any(isinstance(one, Exception) for one in found)
    assert all(map(joint.can_take, models))
    assert not joint._copy.names  # one that has gone is not kept by a copy that is made just then
    monkeypatch.undo()
    joint.compute(calls_of(models)[:2], backward=False)
    assert set(joint._copy.names) == set(models[:2])


def test_a_failure_of_servers_does_not_end_sharing(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base = dense_base(folders)
    models, joint = tuners(base), Joint(base)

    def refused(model: Any, parts: Any, *, backward: bool) -> Any:
        raise ConfigError("adapters take more than a server allows a request")

    monkeypatch.setattr("swarm_plugins.tuning.joint.run_pass", refused)
    found = joint.compute(calls_of(models), backward=True)
    assert not any(isinstance(one, Exception) for one in found)
    assert all(map(joint.can_take, models))


def test_other_threads_make_modules_as_always_meanwhile(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    some = tuners(base)
    devices = []

    def update(self: Any, *args: Any, **options: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            devices.append(pool.submit(lambda: torch.nn.Linear(1, 1).weight.device.type).result())
        updating(self, *args, **options)

    updating = Linear.update_layer
    monkeypatch.setattr(Linear, "update_layer", update)
    Joint(base)._with(some)
    assert set(devices) == {"cpu"}
