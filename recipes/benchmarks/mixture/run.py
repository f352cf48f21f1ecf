"""A mixture in 4 bits: a token by offloaded experts over one by llama.cpp, in memory and under one memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import Progress

from recipes.benchmarks.arms import check_directory, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.llama.files import write_model
from recipes.benchmarks.llama.process import LlamaCpp, need_llama_cpp
from recipes.benchmarks.measure import take_turns
from recipes.benchmarks.memory_group import MemoryGroup
from recipes.benchmarks.mixture.sides import Ours, Text, Theirs
from recipes.benchmarks.offload.budgets import Budgets, budgets_of, parse_share
from recipes.benchmarks.offload.figures import ArmName
from recipes.benchmarks.offload.worker import ArmProcess, Job, drop_page_cache
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.plan.sizes import model_sizes
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.sizes import format_bytes

PROMPT_TOKENS = 48
BITS = 4
GOAL = 2.0
"""Most time of a token over llama.cpp's, with all experts in memory."""
LIMITED_GOAL = 1.0
"""The same under a memory limit."""
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A comparison of greedy decoding of one sequence, by both sides in turns."""

    directory: Path
    """The mixture, not in few bits."""
    fast: str
    """Share of the experts in memory under the limit, such as ``50%``."""
    dtype: str
    """Type that our side computes in."""
    new_tokens: int
    """Tokens decoded in a round."""
    rounds: int
    """Rounds after one to warm up, each with another piece of text."""

    def report(self, progress: Progress) -> SwarmReport:
        """Quantizes the mixture for both sides, and measures.

        Raises:
            ConfigError: If an argument is wrong, or the model is in few bits already.
            MissingExtraError: If llama.cpp is not installed.
            UnsupportedError: If llama.cpp, or our offloading, does not know the model.
        """
        share = parse_share(self.fast)
        if self.dtype not in _DTYPES:
            raise ConfigError(f"invalid --dtype {self.dtype!r}: expected {' or '.join(_DTYPES)}")
        need_llama_cpp()
        name = check_directory(self.directory).resolve().name
        report = SwarmReport(command="benchmark mixture", model=name, headings=("llama.cpp", "ours"))
        # Next to the model: a temporary folder may be in memory.
        with TemporaryDirectory(prefix=".mixture-", dir=self.directory.resolve().parent) as folder:
            store, gguf = Path(folder) / "store", Path(folder) / "q4_0.gguf"
            quantize_checkpoint(self.directory, store, expert_bits=BITS, other_bits=BITS, progress=False)
            write_model(self.directory, gguf, "Q4_0")
            report.notes.append(
                f"{self.new_tokens} tokens after {PROMPT_TOKENS}; experts and other linear layers in {BITS} bits, "
                f"computed in {self.dtype}; llama.cpp's file, Q4_0, has {format_bytes(gguf.stat().st_size)}; "
                "one thread a side"
            )
            self._all_in_memory(report, store, gguf, progress)
            self._limited(report, store, gguf, share, progress)
        return report

    def _all_in_memory(self, report: SwarmReport, store: Path, gguf: Path, progress: Progress) -> None:
        # Nothing is read ahead, as for anyone whose memory holds all experts.
        job = self._job(ArmName.NO_GUESSES, store, self._budgets(store, 1.0), limit_bytes=0)
        with ArmProcess(job) as process, LlamaCpp(gguf) as llama:
            self._compare(report, "a token, all experts in memory", GOAL, process, llama, None, progress)

    def _limited(self, report: SwarmReport, store: Path, gguf: Path, share: float, progress: Progress) -> None:
        budgets = self._budgets(store, share)
        limit = budgets.limit + self._head_bytes()
        with MemoryGroup(limit) as group:
            if group.path is None:
                report.notes.append(
                    "no figure under a memory limit: this user may not make a control group, and nothing else limits "
                    "the pages of mapped files"
                )
                return
            # Pages that are in memory by now would be free.
            drop_page_cache([gguf, *store.iterdir()])
            job = self._job(ArmName.FULL, store, budgets, limit_bytes=limit)
            with ArmProcess(job) as process, LlamaCpp(gguf) as llama:
                name = f"a token, {share:.0%} of the experts in memory"
                ours, theirs = self._compare(report, name, LIMITED_GOAL, process, llama, group.path, progress)
        report.notes.append(
            f"that with a limit of {format_bytes(limit)} for each side, page cache included and without the libraries; "
            f"read from the disk for a token: llama.cpp {format_bytes(theirs.read_bytes)}, its prompts included, ours "
            f"{format_bytes(ours.read_bytes)}"
        )
        if gguf.stat().st_size <= limit:
            report.notes.append("all of llama.cpp's file fits into that limit: give a smaller --fast")

    def _budgets(self, store: Path, share: float) -> Budgets:
        context = PROMPT_TOKENS + self.new_tokens
        sizes = model_sizes(Checkpoint.open(store), context_tokens=context, dtype=getattr(torch, self.dtype))
        return budgets_of(sizes, share)

    def _head_bytes(self) -> int:
        """Returns what a product with the output head takes besides its weight: a copy in bfloat16, as measured."""
        if self.dtype == "float32":
            return 0
        config = Checkpoint.open(self.directory).config.get_text_config(decoder=True)
        return int(config.vocab_size * config.hidden_size * getattr(torch, self.dtype).itemsize)

    def _job(self, arm: ArmName, store: Path, budgets: Budgets, *, limit_bytes: int) -> Job:
        return Job(
            arm=arm.value,
            directory=str(store),
            fast_bytes=budgets.fast,
            smallest_bytes=budgets.smallest,
            policy="counting",
            limit_bytes=limit_bytes,
            dtype=self.dtype,
        )

    def _text(self) -> Text:
        vocab_size = Checkpoint.open(self.directory).config.get_text_config(decoder=True).vocab_size
        prompts = (
            prompt_tokens(self.directory, length=PROMPT_TOKENS, vocab_size=vocab_size, shift=index)
            for index in range(self.rounds + 1)
        )
        return Text([prompt[0].tolist() for prompt in prompts], self.new_tokens)

    def _compare(
        self,
        report: SwarmReport,
        name: str,
        goal: float,
        process: ArmProcess,
        llama: LlamaCpp,
        group: Path | None,
        progress: Progress,
    ) -> tuple[Ours, Theirs]:
        """Adds the times of a token; ``group`` is what limits llama.cpp's memory."""
        process.wait_until_ready()
        llama.open(PROMPT_TOKENS + self.new_tokens, group=group)
        text = self._text()
        ours, theirs = Ours(text, process), Theirs(text, llama)
        take_turns(name, (theirs.arm, ours.arm), rounds=self.rounds, progress=progress)
        report.figures.append(
            Figure(
                name=name,
                unit="ms",
                local=theirs.arm.median_s * 1e3,
                swarm=ours.arm.median_s * 1e3,
                ratio=ours.arm.median_s / theirs.arm.median_s,
                goal=goal,
                goal_is_upper_bound=True,
                cpu_ratio=ours.arm.cpu_ratio(theirs.arm),
                rounds=self.rounds,
            )
        )
        return ours, theirs
