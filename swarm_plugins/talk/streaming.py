"""Words of an answer as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase, TextStreamer

__all__ = ["WordStreamer"]


class WordStreamer(TextStreamer):  # type: ignore[no-untyped-call, misc, unused-ignore]  # has no annotations
    """Hands finished words on, in the thread that generates: Ctrl-C ends the answer, and no thread is left behind.

    Args:
        tokenizer: Of the model.
        write: Takes a piece of text; nothing is added to it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.text = ""
        """All that came so far."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Takes words that will not change any more."""
        self.text += text
        if text:
            self.write(text)
