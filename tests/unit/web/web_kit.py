"""Runs an app on a free port of this machine, as its users do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import torch
import uvicorn
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte of ASCII, as grammars need: their masks are made of bytes."""
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = sorted(letter for letter in ByteLevel.alphabet() if letter.isascii())
    vocabulary = {token: index for index, token in enumerate([*specials, "\u0120", "\u010a", *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def sentence_piece_tokenizer() -> Any:
    """A tokenizer whose words begin with their spaces; at the beginning of a text, one is left out."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581Paris", "\u2581is", "Paris", "\u2581" * 4, "return", "\u2581", "x"]
    return LlamaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])


@contextlib.contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """Serves an app; yields its address."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """OpenAI's client, which does not try again."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def expected(model: Any, tokenizer: Any, new_tokens: int, messages: list[Any] = MESSAGES) -> str:
    """What the model answers to messages, by `generate()`."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
