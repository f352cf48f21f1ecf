"""`push_to_hub` in every spelling of PEFT, transformers and trl, on a swarm and with offloaded experts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pytest
import torch
import transformers.utils.hub as transformers_hub
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, find_adapters, load_adapter
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import HubError
from swarm_plugins.hub.folder import WEIGHTS_FILE
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

pytestmark = [
    pytest.mark.timeout(240),
    # Of transformers and trl, about their own arguments.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
TOKENS = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "base", num_layers=2)


@pytest.fixture
def hub(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub with the base, which huggingface_hub and transformers use by default, and a user ``me``."""
    with LocalHub(tokens={"token": "me"}) as running:
        running.add("org/base", directory)
        for name, value in {
            "ENDPOINT": running.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(hub_constants, name, value)
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", "token")
        yield running
        # The threads of uploads in the background.
        if (pool := vars(transformers_hub.hf_api()).get("_thread_pool")) is not None:
            pool.shutdown()


@pytest.fixture(params=["swarm", "offloaded"])
def base(request: pytest.FixtureRequest, hub: LocalHub, directory: Path) -> Iterator[Any]:
    """The base of the Hub, its blocks elsewhere."""
    if request.param == "offloaded":
        yield AutoSwarmModelForCausalLM.from_pretrained("org/base", offload=OffloadConfig(fast_bytes=100_000))
        return
    with InProcessSwarm("org/base") as swarm:
        yield AutoSwarmModelForCausalLM.from_pretrained("org/base", connection=swarm.connection)


def adapted(base: Any) -> PeftModel:
    """A LoRA whose factors are not zero."""
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "hub_model_id": "me/adapter",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }


def by_peft(base: Any, folder: Path) -> PeftModel:
    model = adapted(base)
    model.push_to_hub("me/adapter", tags=["of-mine"])
    return model


def by_trainer(base: Any, folder: Path) -> PeftModel:
    model = adapted(base)
    trainer = Trainer(model, TrainingArguments(**arguments(folder, save_strategy="no")), train_dataset=ROWS)  # type: ignore[arg-type]
    trainer.train()
    trainer.push_to_hub(tags=["of-mine"])
    return model.eval()


def by_arguments(base: Any, folder: Path) -> PeftModel:
    model = adapted(base)
    options = arguments(folder, push_to_hub=True, save_steps=1, hub_always_push=True)
    trainer = Trainer(model, TrainingArguments(**options), train_dataset=ROWS)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model()
    return model.eval()


def by_trl(base: Any, folder: Path) -> PeftModel:
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        base,
        args=SFTConfig(**arguments(folder, save_strategy="no", max_length=16, bf16=False)),
        train_dataset=Dataset.from_dict({"text": ["Four score and seven years ago"] * 4}),
        processing_class=AutoTokenizer.from_pretrained("org/base"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.push_to_hub(tags=["of-mine"])
    model: PeftModel = trainer.model
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("push", [by_peft, by_trainer, by_arguments, by_trl])
def test_what_is_pushed_is_found_checked_and_equal(
    push: Callable[[Any, Path], PeftModel], base: Any, hub: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = push(base, tmp_path)
    commit = HfApi().model_info("org/base").sha
    own_tags = set() if push is by_arguments else {"of-mine"}
    files = {one.rfilename for one in HfApi().model_info("me/adapter").siblings or ()}
    assert {"adapter_config.json", "adapter_model.safetensors", "swarm.json", "README.md"} <= files
    assert not [name for name in files if name.startswith(("model", "pytorch_model"))]

    path = HfApi().hf_hub_download("me/adapter", "adapter_model.safetensors")
    with safe_open(path, "pt") as opened:
        # Two factors for two modules of two layers, and nothing of the base.
        assert [name for name in opened.keys() if ".lora_" not in name] == []  # noqa: SIM118
        assert len(opened.keys()) == 8
    config = json.loads(Path(HfApi().hf_hub_download("me/adapter", "adapter_config.json")).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", commit)
    card = ModelCard.load("me/adapter")
    assert card.data.base_model == "org/base"
    assert {f"swarm-base:{commit}", "swarm_plugins", *own_tags} <= set(card.data.tags or ())

    assert [one.repo_id for one in find_adapters("org/base")] == ["me/adapter"]
    assert [one.repo_id for one in find_adapters("org/base", "main")] == ["me/adapter"]
    plain = AutoModelForCausalLM.from_pretrained("org/base")
    with caplog.at_level(logging.WARNING, "swarm_plugins"):
        loaded = load_adapter(plain, "me/adapter")
    assert "unchecked" not in caplog.text
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    folder = HfApi().snapshot_download("me/adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base"), folder)
    assert torch.equal(logits(theirs), logits(loaded))


def test_prompts_go_to_a_branch_whose_card_keeps_its_tags(base: Any, hub: LocalHub) -> None:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM", tokenizer_name_or_path="org/base")
    model = get_peft_model(base, config)
    for tag in ("one", "two"):
        model.push_to_hub("me/prompts", revision="try", tags=[tag])
    card = ModelCard(Path(HfApi().hf_hub_download("me/prompts", "README.md", revision="try")).read_text())
    assert {"two", "swarm_plugins"} <= set(card.data.tags or ())
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base")
    plain = load_adapter(AutoModelForCausalLM.from_pretrained("org/base"), "me/prompts", "try")
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    # Branches are tries: what is found is on the main branch, or has a version's tag.
    assert find_adapters("org/base") == []


def test_the_base_is_a_directory(directory: Path, hub: LocalHub) -> None:
    base = AutoSwarmModelForCausalLM.from_pretrained(directory, offload="none")
    model = adapted(base)
    model.push_to_hub("me/adapter")
    card = ModelCard.load("me/adapter")
    assert card.data.base_model is None, "the Hub refuses a path"
    assert str(directory) not in card.content
    [found] = find_adapters(Checkpoint.open(directory).version)
    assert found.repo_id == "me/adapter"
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(directory), "me/adapter")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("repo_id", "token", "said"),
    [
        pytest.param("me/adapter", False, r"^push to me/adapter: no valid token.*hf auth login", id="no-token"),
        pytest.param("you/adapter", "token", r"^push to you/adapter: not allowed .*of your own$", id="not-mine"),
    ],
)
def test_a_refused_push_is_one_sentence_and_leaves_nothing(
    repo_id: str, token: str | bool, said: str, base: Any, hub: LocalHub
) -> None:
    hub.add("you/adapter", {"README.md": b"mine"})
    before = [(repo.repo_id, dict(repo.branches)) for repo in hub.store.repos()]
    with pytest.raises(HubError, match=said) as refused:
        adapted(base).push_to_hub(repo_id, token=token)
    assert "\n" not in str(refused.value)
    assert [(repo.repo_id, dict(repo.branches)) for repo in hub.store.repos()] == before


def test_a_trainer_says_before_the_first_step_that_it_may_not_push(base: Any, hub: LocalHub, tmp_path: Path) -> None:
    options = arguments(tmp_path, push_to_hub=True, hub_model_id="you/adapter")
    with pytest.raises(HubError, match=r"^push to you/adapter: not allowed .*of your own$"):
        Trainer(adapted(base), TrainingArguments(**options), train_dataset=ROWS)  # type: ignore[arg-type]
    trainer = Trainer(adapted(base), TrainingArguments(**arguments(tmp_path)), train_dataset=ROWS)  # type: ignore[arg-type]
    with pytest.raises(HubError, match=r"^push to me/adapter: no valid token.*hf auth login"):
        trainer.push_to_hub(token="expired")
    assert [repo.repo_id for repo in hub.store.repos()] == ["org/base"]


def test_a_model_of_transformers_alone_is_saved_as_before(directory: Path, hub: LocalHub, tmp_path: Path) -> None:
    AutoSwarmModelForCausalLM.from_pretrained(directory, offload="none")
    model = adapted(AutoModelForCausalLM.from_pretrained(directory))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} == {"README.md", "adapter_config.json", WEIGHTS_FILE}
    with pytest.raises(HfHubHTTPError):
        model.push_to_hub("me/adapter", token="expired")
    options = arguments(tmp_path, push_to_hub=True, hub_model_id="you/adapter")
    with pytest.raises(HfHubHTTPError, match="403"):
        Trainer(model, TrainingArguments(**options), train_dataset=ROWS)  # type: ignore[arg-type]
