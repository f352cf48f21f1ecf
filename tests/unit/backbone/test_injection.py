"""One warning that a user of PEFT can do nothing about is ignored, and no other."""

from __future__ import annotations

import warnings

import pytest

from swarm_plugins.backbone.injection import ignore_deprecation
from swarm_plugins.testing.models import tiny_model


def test_the_property_that_peft_reads_is_no_warning_but_others_are() -> None:
    model = tiny_model("llama", num_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="is_gradient_checkpointing"):
            assert not model.is_gradient_checkpointing
        ignore_deprecation()
        assert not model.is_gradient_checkpointing
        with pytest.raises(FutureWarning, match="another"):
            warnings.warn("`another` is deprecated", FutureWarning, stacklevel=1)
