"""Answers prompts with llama.cpp: it logs to standard error and starts threads, so it runs in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp


def main() -> None:
    asked = json.loads(sys.stdin.read())
    params: Any = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = 1
    if asked["lora"]:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(asked["lora"], 1.0)]
    server: Any = xllamacpp.Server(params)
    answers = []
    for prompt in asked["prompts"]:
        request = {"prompt": prompt, "n_predict": asked["num_tokens"], "temperature": 0, "top_k": 1, "n_probs": 1}
        never = [[token, False] for token in asked["never"]]
        found: Any = server.handle_completions({**request, "logit_bias": never, "cache_prompt": False})
        if isinstance(found, (str, bytes)):
            found = json.loads(found)
        steps = found["choices"][0]["logprobs"]["content"]
        answers.append({"tokens": [one["id"] for one in steps], "logprobs": [one["logprob"] for one in steps]})
    sys.stdout.write(json.dumps(answers) + "\n")


main()
