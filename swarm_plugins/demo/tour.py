"""``swarm demo``: model, servers, training, generation, Hub, and back into the plain model."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from swarm_plugins.backbone.context import SwarmSettings, active_place
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.demo.model import VARIANTS, default_folder, demo_model
from swarm_plugins.demo.text import Pieces, demo_pieces
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.model_names import expanded
from swarm_plugins.noise import quiet_loading
from swarm_plugins.talk.turns import WordStreamer

if TYPE_CHECKING:
    from swarm_plugins.demo.tuning import DemoTuner

_NUM_SERVERS = 3
_REPO = "me/sotu-adapter"
# A local Hub accepts any token, but the libraries do not push without one.
_TOKEN = "local"
_PROMPT = "Fellow citizens, the state of the Union this year is"
_SAME = 1e-3
"""Largest difference between an adapter's losses on the swarm and in the plain model: additions in another order."""


@dataclass(frozen=True, kw_only=True)
class TourSettings:
    """Length of the tour."""

    method: str
    """A name of `demo.tuning.METHODS`."""
    steps: int = 24
    """Training steps."""
    held_out: int = 16
    """Documents to measure on."""
    new_tokens: int = 32
    """Tokens per answer."""
    threads: int
    """CPU threads per process."""
    model: Path | None = None
    """Directory of a model. None: the demonstration's own."""


SHORT = {"steps": 4, "held_out": 4, "new_tokens": 8}
"""Settings of a short tour."""


class Tour:
    """The tour; everything it starts ends with `run`.

    Args:
        settings: Length of the tour.
        folder: Folder for Hub and adapter.
        tune: `demo.tuning.tune`, which trains and publishes.
        write: Prints text as given, without a newline.
    """

    def __init__(
        self,
        settings: TourSettings,
        folder: Path,
        *,
        tune: Callable[..., tuple[DemoTuner, str]],
        write: Callable[[str], Any],
    ) -> None:
        self.settings = settings
        self.folder = expanded(folder).absolute()
        self._tune_adapter = tune
        self._write = write
        self._started = 0.0

    def run(self) -> None:
        """Runs all steps.

        Raises:
            SwarmError: If a step fails, or the adapter loaded from the Hub differs from the trained one.
        """
        self._started = time.monotonic()
        torch.set_num_threads(self.settings.threads)
        self.folder.mkdir(parents=True, exist_ok=True)
        with quiet_loading(), self._alone():
            model = self._model()
            tokenizer = AutoTokenizer.from_pretrained(model)
            pieces = demo_pieces(tokenizer)
            pieces = Pieces(train=pieces.train, held_out=pieces.held_out[: self.settings.held_out])
            with LocalHub(self.folder / "hub") as hub:
                tuner, tag = self._on_swarm(model, tokenizer, pieces, hub)
                self._back(model, tuner, pieces, hub, tag)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        # Two tours in one folder would publish each other's versions.
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as exc:
            raise ConfigError(f"another demo runs in {self.folder}: wait for it, or give another --dir") from exc
        try:
            yield
        finally:
            lock.release()

    def _model(self) -> Path:
        if self.settings.model is not None:
            self._say(f"1. {self.settings.model}")
            return self.settings.model
        variant = VARIANTS["4x1536"]
        folder = default_folder(variant)
        self._say(f"1. SmolLM2-135M-Instruct as a mixture of {variant.num_experts} experts, in {folder}")
        built = demo_model(variant, folder)
        self._say(f"   same output as the dense model: logits differ by at most {built.logit_difference:.0e}")
        return folder

    def _on_swarm(
        self, model: Path, tokenizer: PreTrainedTokenizerBase, pieces: Pieces, hub: LocalHub
    ) -> tuple[DemoTuner, str]:
        self._say(f"2. {_NUM_SERVERS} servers, each a process with a third of the blocks")
        with LocalSwarm(model, num_servers=_NUM_SERVERS, threads=self.settings.threads) as swarm:
            for server in swarm.servers:
                self._say(f"   process {server.pid} serves blocks {server.span[0]} to {server.span[1] - 1}")
            try:
                with active_place(SwarmSettings(initial_peers=tuple(swarm.initial_peers), config=SwarmConfig())):
                    tuner, tag = self._tune(model, pieces, hub)
                self._talk(tuner, tokenizer)
            except SwarmError as error:
                # The other servers end with the demo: where to start this one again is of no use.
                for server in swarm.servers:
                    if not server.is_alive:
                        raise SwarmError(
                            f"server process {server.pid} {server.ending}; run the demo again. Its Hub has ended too: "
                            f"swarm hub --dir {self.folder / 'hub'} starts it, at another address to push to"
                        ) from error
                raise
            return tuner, tag

    def _tune(self, model: Path, pieces: Pieces, hub: LocalHub) -> tuple[DemoTuner, str]:
        settings = self.settings
        self._say(
            f'3. {settings.steps} steps of {settings.method} with Trainer(strategy="swarm"), on presidential addresses'
        )
        self._say(f"   measured on {len(pieces.held_out)} addresses kept out of training")
        tuner, tag = self._tune_adapter(
            model,
            settings.method,
            pieces,
            steps=settings.steps,
            folder=self.folder,
            repo=_REPO,
            endpoint=hub.endpoint,
            token=_TOKEN,
        )
        self._say(f"   held-out loss before: {Figure.of(tuner.before)} (mean and standard error over addresses)")
        self._say(f"   held-out loss after:  {Figure.of(tuner.after)}")
        self._say(f"   change per address:   {change(tuner.before, tuner.after)}")
        # One loss per address, for plots and paired tests.
        losses = {"before": tuner.before.tolist(), "after": tuner.after.tolist()}
        (self.folder / "losses.json").write_text(json.dumps(losses))
        self._say(f"   published as {_REPO}@{tag}, a commit on a Hub in {self.folder / 'hub'}")
        return tuner, tag

    def _talk(self, tuner: DemoTuner, tokenizer: PreTrainedTokenizerBase) -> None:
        self._say("4. generate() through the swarm, greedy")
        tuner.tuned.eval()
        with tuner.tuned.disable_adapter():
            self._answer(tuner.tuned, tokenizer, "without the adapter")
        self._answer(tuner.tuned, tokenizer, "with the adapter")

    def _answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
        self._write(f"   {what}: {_PROMPT}")
        streamer = WordStreamer(tokenizer, lambda text: self._write(text.replace("\n", " ")))
        inputs = tokenizer(_PROMPT, return_tensors="pt")
        with torch.no_grad():
            model.generate(
                **inputs, max_new_tokens=self.settings.new_tokens, do_sample=False, streamer=streamer, pad_token_id=0
            )
        self._write("\n")

    def _back(self, model: Path, tuner: DemoTuner, pieces: Pieces, hub: LocalHub, tag: str) -> None:
        self._say(f"5. {_REPO}@{tag} from the Hub in the plain transformers model, without servers")
        expected = tuner.after
        tuner.model = None
        gc.collect()
        load: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_pretrained
        cache = self.folder / "downloads"
        plain = load_adapter(
            load(model, dtype=torch.float32), _REPO, tag, endpoint=hub.endpoint, token=_TOKEN, cache_dir=cache
        )
        found = losses_of(plain, pieces.held_out, "held-out loss here")
        difference = float((found - expected).abs().max())
        self._say(f"   held-out loss here:   {Figure.of(found)}, each address within {difference:.1e}")
        if not difference <= _SAME:
            raise SwarmError(
                f"with {_REPO}@{tag}, losses of the plain model and on the swarm differ by {difference:.3g}; rounding "
                f"explains at most {_SAME:g}"
            )
        self._say(f"Done in {time.monotonic() - self._started:.0f} s. The adapter is in {self.folder / 'adapters'}.")

    def _say(self, text: str) -> None:
        self._write(f"{text}\n")
