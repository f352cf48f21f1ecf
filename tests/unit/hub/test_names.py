"""Names of repositories and tags."""

from __future__ import annotations

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.hub.names import check_repo_id, check_tag, newest_tag, next_tag, sorted_tags


@pytest.mark.parametrize("name", ["me/my-adapter", "adapter", "a/b.c_d"])
def test_names_of_repositories_are_taken(name: str) -> None:
    assert check_repo_id(name) == name


@pytest.mark.parametrize("name", ["", "a/b/c", "a b", "me/x--y", "me/../x", "/x", "me/" + "x" * 100])
def test_impossible_names_are_refused_with_the_value(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be the name of a repository .* such as 'me/my-adapter'") as caught:
        check_repo_id(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("tag", ["", "main", "latest", "a b", "x/y", "v1..2", "-x", "v1.lock"])
def test_impossible_tags_are_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be the tag of a version"):
        check_tag(tag)


def test_versions_count_by_number_and_not_by_letter() -> None:
    tags = ["v2", "v10", "v9", "1.0", "vnext", "v0"]
    assert (newest_tag(tags), next_tag(tags)) == ("v10", "v11")
    assert sorted_tags(tags) == ["v10", "v9", "v2"]
    assert (newest_tag(["x"]), next_tag(["x"])) == (None, "v1")
