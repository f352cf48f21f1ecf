"""Changes of one line that break the package, each with the tests that must notice: `make mutants`.

A cell of a matrix stays only if it notices a mutant that no other cell does. Each mutant is made in a copy of the
package; its tests have to fail there. `python tests/mutants.py NAME ...` tries some of them only, and `--tests` other
tests than their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_COPIED = (".git", ".venv", ".*_cache", "build", "dist", "runs", "site")


@dataclass(frozen=True)
class Mutant:
    """A line of a file of the package, what replaces it, and pytest's arguments for the tests that notice."""

    file: str
    old: str
    new: str
    tests: str


GENERATE = "tests/parity/test_generate.py"
OUTPUTS = "tests/parity/test_outputs.py"
MUTANTS = {
    "rows of beams stay where they are": Mutant(
        "blocks/kv.py",
        "for kept in self._kept], rows)",
        "for kept in self._kept], sorted(rows))",
        f"{GENERATE} -k beam-llama",
    ),
    "a cropped cache keeps one token too many": Mutant(
        "blocks/kv.py",
        "self._before = states, None\n        self.length = length",
        "self._before = states, None\n        self.length = min(length + 1, self.length)",
        f"{GENERATE} -k prompt_lookup-llama",
    ),
    "a fork lacks the last token": Mutant(
        "blocks/kv.py",
        "new.first - old.first, self.length - new.first)",
        "new.first - old.first, self.length - new.first - 1)",
        "tests/unit/blocks/test_kv.py",
    ),
    "packed sessions begin at position 0": Mutant(
        "blocks/packed.py",
        "torch.arange(self.length - self.num_new, self.length,",
        "torch.arange(0, self.num_new,",
        "tests/unit/blocks/test_span_step.py",
    ),
    "stacked sessions get each other's states": Mutant(
        "blocks/stacked.py",
        "for part in self.parts])\n\n    def _cut",
        "for part in self.parts]).flip(0)\n\n    def _cut",
        "tests/unit/blocks/test_stacked.py -k mamba2",
    ),
    "a module that is merged for its bias is not merged for its weight": Mutant(
        "merging/adapter.py",
        "part.merged_adapters.clear()",
        "pass",
        "tests/unit/merging/test_merge.py -k transposed-experts-biases",
    ),
    "shared embeddings stay shared though one of them changes": Mutant(
        "merging/merged.py",
        "return True, extra",
        "return False, {}",
        "tests/unit/merging/test_merge.py -k shared_embeddings",
    ),
    "rows of a head are written in halves": Mutant(
        "merging/llama_cpp/architectures.py",
        "halves.transpose(1, 2)",
        "halves",
        "tests/unit/merging/test_gguf.py -k paired",
    ),
    "a LoRA in GGUF has the scaling of plain LoRA": Mutant(
        "merging/llama_cpp/lora.py",
        "(scaling * a.shape[-2] / alpha)",
        "1.0",
        "tests/unit/merging/test_gguf.py -k products",
    ),
    "padding of keys is not masked": Mutant(
        "blocks/stacked.py",
        "return _padded(masks, dim=1)",
        "return None",
        "tests/unit/blocks/test_stacked.py -k bloom",
    ),
    "a latent cache is attended to where it lies": Mutant(
        "blocks/packed.py",
        "if self._joined.get(layer_idx, True):",
        "if False:",
        "tests/unit/blocks/test_span_step.py -k deepseek_v3",
    ),
    "hidden states are counted from the first block": Mutant(
        "backbone/hooks.py",
        "seen.union(index - 1 for index in selected)",
        "frozenset(selected)",
        "tests/parity/test_hidden_states.py",
    ),
    "blocks at the start and at the end change places": Mutant(
        "backbone/stack.py",
        "range(first, self.num_blocks - last)",
        "range(last, self.num_blocks - first)",
        "tests/unit/backbone/test_local_blocks.py",
    ),
    "router logits of the first remote block come for each": Mutant(
        "backbone/stack.py",
        'collector["router_logits"].append(running.routers[index])',
        'collector["router_logits"].append(next(iter(running.routers.values())))',
        f"{OUTPUTS} -k test_router_logits_are_equal",
    ),
    "a recomputation draws another dropout": Mutant(
        "blocks/adapters/apply.py",
        "torch.Generator().manual_seed(int.from_bytes(name",
        "torch.Generator().manual_seed(torch.seed() + int.from_bytes(name[:4]",
        "tests/parity/test_adapters_peft.py -k dropout",
    ),
    "all rows of a batch draw the same dropout": Mutant(
        "blocks/adapters/apply.py", 'f"{seed + row}/', 'f"{seed}/', "tests/unit/blocks/test_apply.py"
    ),
    "experts are weighted in another order than they run": Mutant(
        "moe/table.py",
        "scales.reshape(-1, 1).index_select(0, self.routing.order)",
        "scales.reshape(-1, 1)",
        "tests/unit/moe/test_table.py",
    ),
    "transposed experts are multiplied as they lie": Mutant(
        "moe/table.py",
        "weight if self.module.is_transposed else weight.transpose(1, 2)",
        "weight.transpose(1, 2)",
        f"{OUTPUTS} -k test_logits_are_equal and gpt_oss",
    ),
    "a peer takes the graph of another": Mutant(
        "server/state/activations.py",
        "if kept is None or kept.peer != peer:",
        "if kept is None:",
        "tests/unit/server/state",
    ),
    "an answer without meaning is honest": Mutant(
        "verification/scores.py",
        "return not (self.median <= limit.median and self.worst <= limit.worst and abs(self.gain) <= limit.gain)",
        "return self.median > limit.median or self.worst > limit.worst or abs(self.gain) > limit.gain",
        "tests/unit/verification",
    ),
    "the most used expert is evicted": Mutant(
        "offload/cache/policy.py",
        "for expert in reversed(counts.order):",
        "for expert in counts.order:",
        "tests/unit/offload/cache/test_policy.py",
    ),
    "large experts stay as long as small ones": Mutant(
        "offload/cache/policy.py",
        "counts.uses(expert) / self._bytes[other]",
        "counts.uses(expert)",
        "tests/unit/offload/cache/test_policy.py",
    ),
    "bytes read in place arrive one block late": Mutant(
        "offload/disk/reader.py",
        "offset = item.offset + begin - item.start",
        "offset = item.offset + begin - item.start + BLOCK_BYTES",
        "tests/unit/offload/disk/test_reader.py",
    ),
    "an offloaded model that is gone keeps its threads": Mutant(
        "offload/model/attach.py",
        "    weakref.finalize(ahead, cache.close)\n",
        "",
        "tests/unit/offload/test_load.py -k leaves_no_thread",
    ),
    "masks that a model makes take no memory": Mutant(
        "server/state/cutting.py",
        "is_padded or spec.makes_masks or",
        "is_padded or",
        "tests/unit/server/state/test_cutting.py",
    ),
    "trust in a server is for all that it ever serves": Mutant(
        "verification/checker.py",
        "Server(peer, what, info.version,",
        'Server(peer, what, "",',
        "tests/unit/client/test_two_models.py",
    ),
    "what does not fit one model is left out for all": Mutant(
        "client/discovery/server_view.py",
        "            self._misfits[peer] = self.peers.book.now\n",
        "            self._misfits[peer] = self.peers.book.now\n            self.ban(peer, exc)\n",
        "tests/unit/client/test_two_models.py",
    ),
    "cancelling the end of calls told ahead leaves them": Mutant(
        "client/calls/pushing.py",
        "await asyncio.shield(closing)",
        "await closing",
        "tests/unit/client/test_chain_call.py -k told_ahead",
    ),
    "a step without its adapter is replayed": Mutant(
        "client/calls/pushing.py",
        "raise SentInVainError(str(exc)) from exc",
        "raise",
        "tests/parity/test_push.py -k drops",
    ),
    "a server that is late has all the time": Mutant(
        "client/peers.py",
        "limit_s=min(sign_s, max(left_s, rules.sign_of_life_s))",
        "limit_s=1e9",
        "tests/unit/client/test_late_servers.py -k in_this_process",
    ),
    "a gap as long as a part is fetched along": Mutant(
        "checkpoint/ranges.py",
        "piece.start - ranges[-1][1] <= _GAP_BYTES",
        "piece.start - ranges[-1][1] <= _PART_BYTES",
        "tests/unit/checkpoint/test_hub.py -k all_that_is_downloaded",
    ),
    "a file of any size is downloaded with an adapter": Mutant(
        "hub/download.py",
        "seen.file_size > limit",
        "seen.file_size < 0",
        "tests/unit/hub/test_download.py",
    ),
}


def is_noticed(mutant: Mutant, tests: str) -> bool:
    """Returns whether a test fails with the mutant.

    Raises:
        ValueError: If the line is not there, or more than once; or if the tests cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        file = copy / "swarm_plugins" / mutant.file
        text = file.read_text()
        if (found := text.count(mutant.old)) != 1:
            raise ValueError(f"{mutant.file} has {found} times: {mutant.old}")
        file.write_text(text.replace(mutant.old, mutant.new))
        files, _, chosen = tests.partition(" -k ")
        arguments = [*files.split(), *(["-k", chosen] if chosen else [])]
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", "not network and not gpu", *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1):
        raise ValueError(
            f"pytest {tests} has ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 1


def main() -> int:
    """Tries mutants; returns the number of those that nobody noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--tests", help="pytest's arguments, instead of each mutant's own")
    options = parser.parse_args()
    unnoticed = 0
    for name in options.names or MUTANTS:
        noticed = is_noticed(MUTANTS[name], options.tests or MUTANTS[name].tests)
        sys.stdout.write(f"{'noticed ' if noticed else 'SURVIVED'} {name}\n")
        sys.stdout.flush()
        unnoticed += not noticed
    return unnoticed


if __name__ == "__main__":
    sys.exit(main())
