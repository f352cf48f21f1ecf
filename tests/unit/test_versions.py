"""Model versions: written, read back, and equal by content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.errors import ConfigError
from swarm_plugins.versions import ModelVersion

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "text", [f"mistralai/Mixtral-8x7B-v0.1@{SHA}", f"my model@local-{SHA}", f"odd@name@{SHA}"], ids=str
)
def test_what_is_written_is_read_back(text: str) -> None:
    version = ModelVersion.parse(text)
    assert str(version) == text
    assert version.is_local == ("local-" in text)


@given(name=st.text(min_size=1, max_size=256).filter(str.isprintable), local=st.booleans())
def test_any_printable_name_survives(name: str, local: bool) -> None:
    version = ModelVersion(name, f"local-{SHA}" if local else SHA)
    again = ModelVersion.parse(str(version))
    assert (again.name, again.revision) == (version.name, version.revision)


def test_equality_and_key_ignore_the_name() -> None:
    here, there = ModelVersion("copy", f"local-{SHA}"), ModelVersion("original", f"local-{SHA}")
    assert here == there
    assert hash(here) == hash(there)
    assert here.key == there.key


def test_two_revisions_of_one_name_differ() -> None:
    assert ModelVersion("a/b", SHA) != ModelVersion("a/b", SHA[::-1])
    assert ModelVersion("a/b", SHA).key != ModelVersion("a/b", f"local-{SHA}").key


@pytest.mark.parametrize("revision", ["main", "v1.0", SHA[:7], SHA.upper(), f"local-{SHA[:8]}", f"{SHA}\n", ""])
def test_a_revision_that_is_no_hash_is_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match=r"40 hexadecimal digits.*resolve a branch or tag"):
        ModelVersion("a/b", revision)


@pytest.mark.parametrize("name", ["", "x" * 257, "line\nbreak", "\x00"])
def test_a_name_that_is_empty_long_or_unprintable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"1 to 256 printable"):
        ModelVersion(name, SHA)


def test_text_without_a_revision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a/b' is not a model version: expected NAME@REVISION"):
        ModelVersion.parse("a/b")
