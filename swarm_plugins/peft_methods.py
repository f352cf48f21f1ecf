"""PEFT's methods whose own layers servers build: what of a layer is shipped, and the values that servers take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from swarm_plugins.adapter_spec import PeftValue

if TYPE_CHECKING:
    from torch import Tensor, nn


class PeftOption(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a config that shapes a layer or its forward."""

    source: str = ""
    """The layer's attribute that holds the value of each adapter. Empty: the config."""
    allowed: tuple[PeftValue, ...] = ()
    """The values that servers take. Empty: numbers."""
    least: int = 0
    """Smallest number."""
    most: int = 1 << 16
    """Largest number."""


class PeftMethod(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields a server needs to build a method's layer; see `PEFT_METHODS`."""

    options: Mapping[str, PeftOption] = {}
    """What clients ship."""
    fixed: Mapping[str, PeftValue | None] = {}
    """Fields that change the forward in a way that servers do not follow, with the one value that works."""
    local: tuple[str, ...] = ()
    """Fields that matter only where the adapter is initialised, trained or saved."""
    given: Mapping[str, PeftValue] = {}
    """Local fields PEFT requires on the server too."""
    computed: tuple[str, ...] = ()
    """Ends of the names of tensors that follow from the options and are not shipped."""
    dropout: str = ""
    """The layer's attribute with a dropout of its input for each adapter. Empty: none."""
    changes_input: bool = False
    """Whether it changes what the module gets, rather than what it returns: then the first adapter is the outer one."""


_RANK = PeftOption(source="r")
_SIZE, _FLAG = PeftOption(), PeftOption(allowed=(False, True))
_FACTOR, _ALPHA = PeftOption(least=-(1 << 16)), PeftOption(source="alpha", least=-(1 << 16))
_LORA_ALPHA = PeftOption(source="lora_alpha", least=-(1 << 16))
_LYCORIS: Mapping[str, PeftValue | None] = {"rank_dropout": 0.0, "module_dropout": 0.0, "use_effective_conv2d": False}
_PROJECTED = ("projection_prng_key", "save_projection")
PEFT_METHODS: Mapping[str, PeftMethod] = MappingProxyType({
    "ADALORA": PeftMethod(
        options={"init_r": _RANK, "lora_alpha": _LORA_ALPHA},
        local=(
            *("r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
            *("init_lora_weights", "lora_dropout"),
        ),
        given={"total_step": 10},
        dropout="lora_dropout",
    ),
    "BEFT": PeftMethod(),
    "C3A": PeftMethod(options={"block_size": PeftOption(source="block_size")}, local=("block_size_pattern",)),
    "GRALORA": PeftMethod(
        options={"r": _RANK, "alpha": _FACTOR, "hybrid_r": _SIZE, "gralora_k": PeftOption(most=64)},
        local=("gralora_dropout",),
        dropout="gralora_dropout",
    ),
    "HIRA": PeftMethod(options={"r": _RANK}, local=("hira_dropout",), dropout="hira_dropout"),
    "LILY": PeftMethod(
        options={"r": _RANK, "stride_A": _SIZE, "num_B": PeftOption(most=1024), "scaling": _FACTOR},
    ),
    "LOHA": PeftMethod(options={"r": _RANK, "alpha": _ALPHA}, fixed=_LYCORIS),
    "LOKR": PeftMethod(
        options={
            "r": _RANK,
            "alpha": _ALPHA,
            "decompose_both": _FLAG,
            "decompose_factor": PeftOption(least=-1),
        },
        fixed={**_LYCORIS, "rank_dropout_scale": False},
    ),
    # Plain LoRA is of kind ``lora``; this is DoRA, and LoRA with a bias.
    "LORA": PeftMethod(
        options={
            "r": _RANK,
            "lora_alpha": _LORA_ALPHA,
            "use_dora": PeftOption(source="use_dora", allowed=(False, True)),
            "lora_bias": PeftOption(source="lora_bias", allowed=(False, True)),
        },
        given={"init_lora_weights": False},
        dropout="lora_dropout",
    ),
    "MISS": PeftMethod(
        options={
            "r": PeftOption(source="miss_r"),
            "mini_r": PeftOption(source="miss_mini_r"),
            "init_weights": PeftOption(allowed=(True, False, "bat", "mini")),
        },
        fixed={"miss_dropout": 0.0},
    ),
    "OFT": PeftMethod(
        options={
            "oft_block_size": PeftOption(source="oft_block_size", most=1024),
            "block_share": _FLAG,
            "use_cayley_neumann": _FLAG,
            "num_cayley_neumann_terms": PeftOption(most=32),
        },
        fixed={"module_dropout": 0.0, "coft": False},
        local=("r", "eps"),
        changes_input=True,
        computed=(".rows", ".cols"),
    ),
    "RANDLORA": PeftMethod(
        options={"r": _RANK, "randlora_alpha": _FACTOR},
        local=(*_PROJECTED, "sparse", "very_sparse", "randlora_dropout"),
        dropout="randlora_dropout",
    ),
    "ROAD": PeftMethod(
        options={
            "variant": PeftOption(allowed=("road_1", "road_2", "road_4")),
            "group_size": PeftOption(source="group_size"),
        }
    ),
    "VBLORA": PeftMethod(
        options={"r": _RANK, "num_vectors": _SIZE, "vector_length": _SIZE, "topk": PeftOption(most=64)},
        local=("save_only_topk_weights", "init_vector_bank_bound", "init_logits_std", "vblora_dropout"),
        dropout="vblora_dropout",
    ),
    "VERA": PeftMethod(
        options={"r": _RANK}, local=(*_PROJECTED, "d_initial", "vera_dropout"), dropout="vera_dropout"
    ),
})  # fmt: skip
"""PEFT's methods whose own layers servers apply, by the names of ``PeftType``."""


def shipped_tensors(layer: nn.Module, adapter: str, method: str) -> dict[str, Tensor]:
    """Returns an adapter's tensors in one of PEFT's layers, by names without the adapter's; not the computed ones."""
    computed = PEFT_METHODS[method].computed
    found: dict[str, Tensor] = {}
    # With duplicates: adapters may share a tensor, which each of them has.
    parameters, buffers = (every(remove_duplicate=False) for every in (layer.named_parameters, layer.named_buffers))
    for name, tensor in (*parameters, *buffers):
        first, *rest = name.split(".")
        if first != "base_layer" and rest[:1] == [adapter] and not (computed and name.endswith(computed)):
            found[".".join([first, *rest[1:]])] = tensor
    return found
