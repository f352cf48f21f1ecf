"""Tokens in pieces of equal length: running text, conversations, and prompts with completions.

Running text is cut where a piece ends, so nothing is padded; the rest of a document goes on in the next piece. Whole
conversations and prompts with completions are put into pieces, the longest first, each into the fullest one that has
room (best-fit decreasing); end tokens without a loss fill what is left, and longer ones lose their end.

Positions begin at 0 with each document. transformers, and servers of a swarm, conclude from that which tokens may
attend to each other (`masking_utils.find_packed_sequence_indices`), so documents of a piece do not see each other.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError

NO_LOSS = -100
"""Label of tokens that the loss leaves out."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Tokens(NamedTuple):
    """The tokens of a document, or of a part of it."""

    ids: list[int]
    learned: list[bool]
    """Which tokens have a loss."""
    goes_on: bool = False
    """Whether the document began in the tokens before."""


class Packer:
    """Makes pieces of rows; a function for ``Dataset.map(..., batched=True)``, whose cache goes by its content.

    Running text goes on from batch to batch: use one for each data set, in order and in one process.

    Args:
        tokenizer: Tokenizes, and has the chat template for ``messages``.
        columns: What to read: ``messages``, ``prompt`` and ``completion``, or the one column of running text.
        length: Tokens in a piece.
        across_documents: Whether running text attends to the documents before it in its piece.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], length: int, *, across_documents: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.columns = tuple(columns)
        self.length = length
        self.across_documents = across_documents
        self._piece: list[Tokens] = []
        """What the batches so far have left of running text: less than a piece."""
        self._document: Any = None
        """The last one's name."""

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        """Returns ``input_ids``, ``labels`` and ``position_ids`` of pieces that have something to learn."""
        pieces = self._cut(self._texts(rows)) if len(self.columns) == 1 and not self._is_chat else self._fill(rows)
        found: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
        for columns in map(_columns, pieces):
            if set(columns[1]) == {NO_LOSS}:
                # The mean loss of a batch of such pieces is NaN.
                continue
            for name, values in zip(found, columns, strict=True):
                found[name].append(values)
        return found

    @property
    def _is_chat(self) -> bool:
        return self.columns == ("messages",)

    @property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id or 0)

    def _texts(self, rows: Mapping[str, Sequence[Any]]) -> Iterator[Tokens]:
        texts = rows[self.columns[0]]
        names = rows.get("document") or [object() for _ in texts]
        named = [(text, name) for text, name in zip(texts, names, strict=True) if text]
        if not named:
            return
        # Not verbose: documents may be longer than the model takes, pieces are not.
        encoded = self.tokenizer([text for text, _ in named], verbose=False)["input_ids"]
        for ids, (_, name) in zip(encoded, named, strict=True):
            whole = [*without_end(ids, self._end), self._end]
            yield Tokens(whole, [True] * len(whole), goes_on=self.across_documents or name == self._document)
            self._document = name

    def _cut(self, documents: Iterator[Tokens]) -> Iterator[list[Tokens]]:
        room = self.length - sum(len(part.ids) for part in self._piece)
        for document in documents:
            rest = document
            while len(rest.ids) >= room:
                yield [*self._piece, Tokens(rest.ids[:room], rest.learned[:room], rest.goes_on)]
                rest = Tokens(rest.ids[room:], rest.learned[room:], goes_on=True)
                self._piece, room = [], self.length
            if rest.ids:
                self._piece.append(rest)
                room -= len(rest.ids)

    def _fill(self, rows: Mapping[str, Sequence[Any]]) -> Iterator[list[Tokens]]:
        whole = [self._conversation(*row) for row in zip(*(rows[name] for name in self.columns), strict=True)]
        cut = [Tokens(one.ids[: self.length], one.learned[: self.length]) for one in whole]
        pieces: list[list[Tokens]] = []
        # (room, index of the piece), sorted.
        rooms: list[tuple[int, int]] = []
        for one in sorted((one for one in cut if any(one.learned)), key=lambda one: -len(one.ids)):
            place = bisect.bisect_left(rooms, (len(one.ids), 0))
            if place < len(rooms):
                room, index = rooms.pop(place)
            else:
                room, index = self.length, len(pieces)
                pieces.append([])
            pieces[index].append(one)
            bisect.insort(rooms, (room - len(one.ids), index))
        for room, index in rooms:
            pieces[index].append(Tokens([self._end] * room, [False] * room))
        yield from pieces

    def _conversation(self, first: Any, completion: Any = None) -> Tokens:
        if self._is_chat:
            return self._chat(first)
        if not isinstance(first, str):
            # Messages too, as trl takes them; what completes them is learned.
            return self._chat([*first, *completion], since=len(first))
        # Apart from each other, as the prompt comes alone when the model is used.
        prompt = without_end(self.tokenizer(first, verbose=False)["input_ids"], self._end)
        rest = self.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
        rest = [*rest, self._end]
        return Tokens([*prompt, *rest], [False] * len(prompt) + [True] * len(rest))

    def _chat(self, messages: Sequence[Mapping[str, Any]], since: int = 0) -> Tokens:
        # Only fast tokenizers know which tokens a part of the text became.
        if since == 0 and self.tokenizer.is_fast and _GENERATION.search(self._template()):
            found = self._applied(messages, return_assistant_tokens_mask=True)
            return Tokens(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])
        ids = self._ids(messages)
        learned = [False] * len(ids)
        for index, message in enumerate(messages):
            if index < since or message["role"] != "assistant":
                continue
            before = self._ids(messages[:index], add_generation_prompt=True)
            after = self._ids(messages[: index + 1])
            # Some templates write earlier turns otherwise (without their reasoning, say): these are not learned.
            if ids[: len(after)] == after and after[: len(before)] == before:
                learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return Tokens(ids, learned)

    def _ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return list(self._applied(messages, **options)["input_ids"]) if messages else []

    def _applied(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        self._template()
        return self.tokenizer.apply_chat_template(
            [dict(one) for one in messages], tokenize=True, return_dict=True, **options
        )

    def _template(self) -> str:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, which messages need: give one "
                "that has, such as that of an instruct model, as data.tokenizer"
            )
        return self.tokenizer.get_chat_template()


def without_end(ids: list[int], end: int | None) -> list[int]:
    """Returns the tokens of a text that goes on, without the end that some tokenizers put behind each text."""
    return ids[:-1] if ids[-1:] == [end] else ids


def _columns(piece: Sequence[Tokens]) -> tuple[list[int], list[int], list[int]]:
    """Returns tokens, labels and positions of a piece."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for part in piece:
        start = positions[-1] + 1 if part.goes_on and positions else 0
        ids += part.ids
        positions += range(start, start + len(part.ids))
        labels += [one if learned else NO_LOSS for one, learned in zip(part.ids, part.learned, strict=True)]
        if start == 0 and part.ids:
            # The token before is another document's.
            labels[-len(part.ids)] = NO_LOSS
    return ids, labels, positions
