"""Expressions out of configs match as Python's do, and cannot hang."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.int_groups import PackQuantizedFormat
from swarm_plugins.weights.published.methods.known import method_of
from swarm_plugins.weights.published.targets import MAX_CHARS, Target

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.mlp.experts.127.gate_proj",
    "model.layers.3.mlp.gate",
    "lm_head",
    "",
)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*self_attn.q_proj$",
        r".*\.mlp\.(gate|up|down)_proj",
        r"model\.layers\.\d+\.mlp\.experts\.\d+\.(?:gate|up)_proj$",
        "^model.layers.[0-9]+.*(q|k|v)_proj.*?",
        "lm_head",
        "^lm_head$",
        "^$",
        "(a|)+lm",
        r".*layers\.([0-9]|1[0-9])\..*",
        "(q|.*mlp)?",
        "[^l]+head",
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|gate)))$",
        r".*\b\d{2}\b.*|\blm",
        r"(\w+\.){4}q_proj",
        r"[\w.]{3,9}?yers",
    ],
)
def test_published_forms_match_as_in_python(pattern: str) -> None:
    target = Target(pattern)
    assert [target.matches(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


@pytest.mark.parametrize(
    "targets",
    [
        ("re:.*self_attn.*", "re:.*q_proj"),
        ("re:.*q_proj", "re:.*self_attn.*"),
        ("Linear", "re:model"),
        (NAMES[0], "re:."),
    ],
)
def test_of_groups_that_overlap_the_one_of_compressed_tensors_counts(targets: tuple[str, str]) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match", exc_type=ImportError)
    groups = {
        target: {"targets": [target], "format": "pack-quantized", "weights": {"num_bits": 4, "symmetric": not index}}
        for index, target in enumerate(targets)
    }
    method = method_of({"quant_method": "compressed-tensors", "config_groups": groups}, "toy")
    tensors = {part: TensorInfo(part, torch.float16, (8, 1), "file", 0, 16) for part in ("scales", "shape")}
    found = method.format(NAMES[0], (8, 64), tensors)
    [first, *_] = match.match_targets(NAMES[0], torch.nn.Linear(1, 1), targets)
    assert isinstance(found, PackQuantizedFormat)
    assert found.has_zeros == (first == targets[1])


_atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", r"[\d.]", "^", "$", r"\b"])
_TIMES = ["*", "+", "?", "{2}", "{1,2}", "{0,2}?", "{2,}", "{0,}"]
_patterns = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(_TIMES)).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@given(_patterns, st.text("ab.1", max_size=6))
def test_any_known_form_matches_as_in_python(pattern: str, name: str) -> None:
    if len(pattern) <= MAX_CHARS:
        assert Target(pattern).matches(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", ".*.*.*.*.*.*.*.*.*.*y", "(" * 40 + "a" + ")*" * 40 + "b"]
)
def test_an_expression_that_would_keep_python_busy_is_done_at_once(pattern: str) -> None:
    assert not Target(pattern).matches("a" * 2000 + "!")


def test_an_automaton_that_grows_without_end_is_refused() -> None:
    target = Target("(a|b)*a" + "(a|b)" * 40 + "!")
    random = Random(0)
    name = "".join(random.choices("ab", k=100_000))
    with pytest.raises(UnsupportedError, match="too complicated"):
        target.matches(name)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?!a)b", "from character 2 on"),
        (r"(a)\1", "is not known from character 3"),
        ("a{1,17}", "is not known"),
        ("a{2,1}", "is not known"),
        ("a{,2}", "is not known"),
        ("(" * 5 + "a" + "){16}" * 5, "too complicated"),
        ("(a", "is not known"),
        ("a)", "is not known"),
        ("*", "is not known"),
        ("[b-a]", "is not known"),
        ("(" * 41 + "a" + ")" * 41, "is not known"),
        ("a" * 1025, "of 1025 characters, at most 1024"),
    ],
)
def test_other_forms_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Target(pattern)


def test_too_many_expressions_are_refused_with_the_config() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"targets": [f"re:{index}x" * 40 for index in range(65)], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    with pytest.raises(
        UnsupportedError, match=r"of toy cannot be read: expressions among its targets have .* at most 2048"
    ):
        method_of(config, "toy")
