"""Writes the page of model families, from the tables of the tests and from what each type's tiny model shows.

``python tests/parity/families_page.py`` writes docs/reference/families.md; a test compares it with the tables.
"""

from __future__ import annotations

import logging
import tempfile
import textwrap
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import transformers
from image_models import SETTINGS
from test_every_type import REFUSED
from test_every_type import UNBUILT as UNBUILT_TYPES
from transformers.utils.logging import disable_progress_bar
from type_models import save_type

from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.checkpoint.tried import DECODERS, ENCODERS

PAGE = Path(__file__).parent.parent.parent / "docs/reference/families.md"
WHY = {
    "do not run apart from each other": "layers hand on more than hidden states",
    "gives its layers hidden states of shape": "hidden states have other tokens or another order of axes",
    "cannot be served": "its window is made by the cache of transformers alone, and depends on how a text is cut",
    "needs another package": "its tower needs the package timm: with it, as `gemma3n_text`",
    "lists of decoder layers": "it has several lists of layers",
    "has no number of decoder layers": "its layers run on patches of bytes",
}
"""In the page's words, by the refusal."""
PACKED = {
    Packing.SEQUENCE: "yes",
    Packing.ROWS: "decoding",
    Packing.PADDED: "decoding, short",
    Packing.NONE: "no",
}
UNBUILT = "transformers makes no model of its config"


def page() -> str:
    """Returns the page's text."""
    version = ".".join(transformers.__version__.split(".")[:2])
    works = [
        f"| `{name}` | works | {kept} | {packed} |" for name in sorted(DECODERS) for kept, packed in [_shown(name)]
    ]
    reasons = {name: WHY[reason] for name, reason in REFUSED.items()} | dict.fromkeys(UNBUILT_TYPES, UNBUILT)
    refused = [f"| `{name}` | refused | {reason} | |" for name, reason in sorted(reasons.items())]
    total = len(DECODERS) + len(reasons)
    encoders = (
        f"Encoders whose causal language models run as well: {', '.join(f'`{one}`' for one in sorted(ENCODERS))}."
    )
    images = (
        f"{len(SETTINGS)} types are compared in the same way with images in their prompts, by "
        f"`AutoSwarmModelForImageTextToText`: {', '.join(f'`{one}`' for one in sorted(SETTINGS))}. Others load if "
        "their language model is a decoder that works. See [Use models that read images](../how-to/images.md)."
    )
    return f"""# Model families

The types of causal language models of transformers {version}, by `model_type`. Of {total} decoders, {len(DECODERS)} run
on a swarm: a tiny random model of each, on two servers, gives the tokens, logits and gradients of the local one. The
others are refused when they are loaded, with the reason. With another release of transformers, or a type of your own,
servers and clients first try a small random model of the config, cut in two, and refuse the model if its logits or
gradients differ from those of the whole model. This takes a few seconds; images are not compared.

Each of them is compared in beam search, with drafts, with prompts in chunks, with copies of a cache that go on by
themselves, with LoRA, and when a server is killed. Refused are LoRA on `gpt2`, `gpt-sw3` and `openai-gpt` (weights
stored as `[in, out]`) and on the experts of `longcat_flash`; `openai-gpt` takes no cache, and so no drafts. `mamba`,
`mamba2` and `falcon_mamba`, whose cache has a name of its own, take drafts by `Speculation` alone, and no prompts in
chunks. Padded batches with drafts, or with prompts in chunks, can differ in `deepseek_v4` and `minimax_m3_vl_text`,
whose local models depend on how a padded text is cut. `minimax`, `recurrent_gemma`, `rwkv` and `xlstm` keep their
states in other ways than a cache of transformers. Over a swarm they take one, as `past_key_values`, and beams and
drafts work, which their local models lack or get wrong. So beams and batches are compared with the local model without
its cache. All their blocks are remote. `mllama` runs without images, and refuses them: blocks of their own, which are
not called without one, look at these.

A session keeps *keys and values* of each token, *states* (of recurrences and convolutions, or compressed tokens), or an
*indexer's keys*. Where sessions are *packed*, a server computes the tokens of several in one forward: parts of prompts
too, or only *decoding* steps of one token. *Short* sessions are those with at most as many tokens as the model is wide.
Others take turns. Blocks that use keys and values of others, or tokens that an indexer of others has chosen, run on one
server with them.

| `model_type` | on a swarm | a session keeps, or why not | packed |
|---|---|---|---|
{_lines(works)}
{_lines(refused)}

{textwrap.fill(encoders, 120, break_on_hyphens=False)}

## Models that read images

{textwrap.fill(images, 120, break_on_hyphens=False)}
"""


def _lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def _shown(model_type: str) -> tuple[str, str]:
    """Returns what a session of a type keeps, and whether sessions are packed."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(save_type(model_type, Path(folder)))
        with closing(load_span(checkpoint, range(num_blocks_of(checkpoint.config)))) as span:
            layouts = span.spec.kv_layouts.values()
            kept = _kept(layouts)
            # Without anything that is kept there are no sessions.
            return kept, PACKED[span.packing if kept else Packing.NONE]


def _kept(layouts: Iterable[BlockKV]) -> str:
    layouts = list(layouts)
    kinds = {
        "keys and values": any(one.key_heads for one in layouts),
        "an indexer's keys": any(one.index_width for one in layouts),
        "states": any(one.row_bytes or one.grown_bytes for one in layouts),
    }
    return ", ".join(kind for kind, is_kept in kinds.items() if is_kept)


if __name__ == "__main__":
    disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
