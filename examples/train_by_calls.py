"""Fine-tune by calls with Tinker's SDK: a LoRA on texts, and another one by rewards.

```console
pip install -c constraints.txt -e '.[tinker,demo]'
swarm api HuggingFaceTB/SmolLM2-135M-Instruct --train --state-dir runs --api-key tml-me --local-swarm 2
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-me
python examples/train_by_calls.py
```

This program holds no model. The texts are addresses of US presidents; every eighth is held out. The reward is for
answers that end as a sentence within a few words; of 8 answers to a question, those above their mean become likelier.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarm_plugins.recipes import load_rows, split_by_document

import tinker
from tinker import types

TOPICS = [
    "rivers", "the moon", "bread", "horses", "winter", "books", "the sea", "trees", "music", "iron", "bees", "clocks",
    "ships", "salt", "rain", "gold", "cities", "maps", "tea", "birds", "glass", "fire", "roads", "sleep",
]  # fmt: skip
HELD_OUT_TOPICS = ["mountains", "chess", "milk", "the sun", "paper", "whales", "letters", "wheat"]
SAMPLES = 8
"""Of each question."""
SHORT = types.SamplingParams(max_tokens=24, temperature=1.0)


def datum(ids: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Returns a text whose tokens are predicted from those before, with inputs of the loss at each of them."""
    tensors = {
        name: types.TensorData(data=list(one), dtype="float32", shape=[len(one)]) for name, one in inputs.items()
    }
    targets = types.TensorData(data=list(ids[1:]), dtype="int64", shape=[len(ids) - 1])
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def pieces(tokenizer: Any, texts: Sequence[str], length: int) -> Iterator[types.Datum]:
    """Yields running text in pieces of equal length."""
    tokens = itertools.chain.from_iterable(tokenizer(text).input_ids for text in texts)
    return (datum(ids) for ids in iter(lambda: list(itertools.islice(tokens, length)), []) if len(ids) == length)


def supervised(training: Any, dataset: str, steps: int, length: int) -> dict[str, Any]:
    """Trains on texts; returns the loss of a token at each step, and of held-out texts every eighth step."""
    tokenizer = training.get_tokenizer()
    train, held_out = (rows.shuffle(seed=0)["text"] for rows in split_by_document(load_rows(dataset, "text"), None))
    texts, unseen = pieces(tokenizer, train, length), list(itertools.islice(pieces(tokenizer, held_out, length), 16))
    found: dict[str, Any] = {"loss": [], "held_out": []}
    for step in range(steps + 1):
        if step % 8 == 0 or step == steps:
            total = training.forward(unseen, "cross_entropy").result().metrics["loss:sum"]
            found["held_out"].append([step, total / len(unseen) / (length - 1)])
            print(f"step {step}: held-out loss {found['held_out'][-1][1]:.3f}", flush=True)
        if step < steps:
            batch = list(itertools.islice(texts, 8))
            computed = training.forward_backward(batch, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
            found["loss"].append(computed.result().metrics["loss:sum"] / len(batch) / (length - 1))
            stepped.result()
            print(f"step {step + 1}: loss {found['loss'][-1]:.3f}", flush=True)
    return found


def rewarded(training: Any, steps: int, questions: int) -> dict[str, Any]:
    """Trains by rewards of own answers; returns their mean at each step, and that for held-out questions."""
    tokenizer, topics = training.get_tokenizer(), itertools.cycle(TOPICS)
    found: dict[str, Any] = {"reward": [], "held_out": []}
    for step in range(steps + 1):
        sampler = training.save_weights_and_get_sampling_client().result()
        if step in (0, steps):
            found["held_out"].append([step, mean_reward(answers(tokenizer, sampler, HELD_OUT_TOPICS))])
            print(f"step {step}: held-out reward {found['held_out'][-1][1]:.3f}", flush=True)
        if step < steps:
            groups = answers(tokenizer, sampler, list(itertools.islice(topics, questions)))
            # An answer's tokens are as likely as they were drawn, so the first ratio is 1: policy gradients.
            training.forward_backward(list(weighed(groups)), "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=5e-4)).result()
            found["reward"].append(mean_reward(groups))
            print(f"step {step + 1}: reward {found['reward'][-1]:.3f}", flush=True)
    return found


Group = tuple[list[int], list[tuple[Any, float]]]
"""The tokens of a question; answers with their rewards."""


def answers(tokenizer: Any, sampler: Any, topics: Sequence[str]) -> list[Group]:
    """Asks about topics, all at once."""
    asked = []
    for topic in topics:
        message = {"role": "user", "content": f"Write one short sentence about {topic}."}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        asked.append((ids, sampler.sample(types.ModelInput.from_ints(ids), SAMPLES, SHORT)))
    return [(ids, [(one, reward(tokenizer, one)) for one in call.result().sequences]) for ids, call in asked]


def reward(tokenizer: Any, answer: Any) -> float:
    """Rewards an answer that has ended by itself, and does so as a sentence."""
    text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return float(answer.stop_reason == "stop" and text.rstrip().endswith((".", "!", "?")))


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean over all answers."""
    rewards = [reward for _, group in groups for _, reward in group]
    return sum(rewards) / len(rewards)


def weighed(groups: Sequence[Group]) -> Iterator[types.Datum]:
    """Yields questions with answers, whose advantage is how far they are above their group's mean."""
    for question, group in groups:
        mean = mean_reward([(question, group)])
        for answer, value in group:
            before = [0.0] * (len(question) - 1)
            yield datum(
                question + answer.tokens,
                logprobs=before + answer.logprobs,
                advantages=before + [value - mean] * len(answer.tokens),
                reward=[value],  # for the page of runs
            )


def main() -> None:
    """Runs both loops."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="its name at the API")
    parser.add_argument("--dataset", default="sotu", help="texts: a file, or a data set with a column text")
    parser.add_argument("--steps", type=int, default=40, help="steps of each loop")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--questions", type=int, default=3, help="questions of a step")
    parser.add_argument("--json", type=Path, help="file that gets the curves")
    options = parser.parse_args()
    client = tinker.ServiceClient()
    first, second = (client.create_lora_training_client(options.model, rank=8, seed=1).result() for _ in range(2))
    curves = {
        "supervised": supervised(first, options.dataset, options.steps, options.length),
        "rewarded": rewarded(second, options.steps, options.questions),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
