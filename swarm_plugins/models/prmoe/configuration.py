"""Configuration of PR-MoE: how many experts each layer has, and what runs next to them."""

# Without annotations from __future__: transformers checks types, and a string says nothing to it.
import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from swarm_plugins.errors import ConfigError
from swarm_plugins.models.prmoe.presets import preset_settings

# By name, as transformers' own auto classes find the models of a config: the models import this module.
_MODELS = "swarm_plugins.models.prmoe.modeling"
_EXPERTS = ("experts_per_layer", "moe_layers")
_ATTENTION_TP = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}


@strict
class PRMoEConfig(PreTrainedConfig):
    """Configuration of a Pyramid-Residual mixture of experts (DeepSpeed-MoE, Rajbhandari et al. 2022, section 4.1).

    By default everything but the experts is Llama's, and so are the settings that are not listed here. ``norm``,
    ``position_embedding``, ``mlp_gated`` and the biases make it the GPT of the paper.

    Attributes:
        experts_per_layer: Experts of each decoder layer, 0 for a dense one: a list of ``num_hidden_layers`` entries.
            With ``moe_layers`` also one number for all of them, or a list of one entry per MoE layer. It is stored as
            the full list.
        moe_layers: Indices of the layers with experts; None: those with experts in the full list, or every second
            layer if ``experts_per_layer`` is one number.
        residual: Dense MLP of ``intermediate_size`` neurons next to the experts. ``"sum"`` adds its output (section
            4.1.2), ``"learned"`` mixes both by a softmax of two learned coefficients (DeepSpeed's code), None leaves it
            out.
        num_experts_per_tok: Experts per token, the ``k`` of top-k gating. A single expert is weighted by its
            probability among all experts, so that the router gets a gradient from the task; the weights of two and
            more are normalised to a sum of one.
        capacity_factor: Capacity of an expert in tokens, padding included, relative to an even load ``T k / E``; None:
            dropless. See `swarm_plugins.moe.gating.within_capacity`.
        min_capacity: Tokens that an expert takes at least, if ``capacity_factor`` is set; DeepSpeed's default is 4.
        random_token_selection: In training, seats within the capacity go to tokens in random order instead of by
            position, as DeepSpeed does by default.
        router_jitter_noise: In training, inputs of routers are multiplied by random numbers that differ from 1 by this
            at most; DeepSpeed's noisy gate "Jitter" takes 0.01.
        router_aux_loss_coef: Weight of the load-balancing loss, the sum over the layers, while routers are trained.
        output_router_logits: Return router logits and the load-balancing loss in evaluation too.
        moe_intermediate_size: Neurons of an expert; None: ``intermediate_size``.
        mlp_gated: Use gated MLPs, ``down(act(gate(x)) * up(x))``; False: ``down(act(up(x)))``, as in GPT.
        mlp_bias: Give the linear layers of MLPs and experts a bias.
        norm: ``"rms"`` as in Llama, or ``"layer"`` with a bias, as in GPT; ``rms_norm_eps`` belongs to either.
        position_embedding: ``"rotary"`` as in Llama, or ``"learned"`` for ``max_position_embeddings`` vectors, added
            by the first layer.

    Raises:
        ConfigError: If counts, layers and top-k do not fit together.
        StrictDataclassFieldValidationError: If a setting has another type (of transformers, as for its own configs).
    """

    model_type = "prmoe"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  # transformers' declaration

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    experts_per_layer: list[int] | int = 8
    moe_layers: list[int] | None = None
    residual: Literal["sum", "learned"] | None = "sum"
    num_experts_per_tok: int = 1
    capacity_factor: float | int | None = None
    min_capacity: int = 0
    random_token_selection: bool = False
    router_jitter_noise: float | int = 0.0
    router_aux_loss_coef: float | int = 0.01
    output_router_logits: bool = False
    moe_intermediate_size: int | None = None
    mlp_gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    position_embedding: Literal["rotary", "learned"] = "rotary"

    def __post_init__(self, **kwargs: Any) -> None:
        """Completes the list of experts, then checks it."""
        _check_size("num_attention_heads", self.num_attention_heads)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        self.experts_per_layer = _full_list(self.experts_per_layer, self.moe_layers, self.num_hidden_layers)
        self.moe_layers = [layer for layer, experts in enumerate(self.experts_per_layer) if experts]
        self.check_experts()
        super().__post_init__(**kwargs)
        # Auto classes look models up by the class of a config in hand. Registering earlier, while transformers is being
        # imported, would be circular: the models need modules that import the auto classes themselves.
        importlib.import_module(_MODELS)

    def check_experts(self) -> None:
        """Checks that experts fit the layers, and the other settings the experts.

        Raises:
            ConfigError: If they do not.
        """
        experts = self.experts_per_layer
        if isinstance(experts, int) or len(experts) != self.num_hidden_layers:
            raise ConfigError(
                f"experts_per_layer {experts} does not fit {self.num_hidden_layers} layers: give one entry per layer, "
                "0 for a dense one"
            )
        _check_picks(experts, self.num_experts_per_tok)
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ConfigError(
                f"invalid capacity_factor {self.capacity_factor}: expected a number above 0, such as 1.25, or None to "
                "drop no token"
            )
        if self.min_capacity < 0:
            raise ConfigError(f"invalid min_capacity {self.min_capacity}: expected a number of tokens, 0 or more")
        if not 0 <= self.router_jitter_noise < 1:
            raise ConfigError(
                f"invalid router_jitter_noise {self.router_jitter_noise}: expected a number from 0 to below 1, such as "
                "0.01"
            )
        if not 0 <= self.router_aux_loss_coef < math.inf:
            raise ConfigError(
                f"invalid router_aux_loss_coef {self.router_aux_loss_coef}: expected a number of at least 0, such as "
                "0.01; 0 leaves the load unbalanced"
            )
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_key_value_heads", "head_dim"):
            _check_size(name, getattr(self, name))
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Takes a stored config; experts given to ``from_pretrained`` are checked with it, not set afterwards."""
        given: dict[str, Any] = {
            name: kwargs.pop(name) for name in ("experts_per_layer", "moe_layers") if name in kwargs
        }
        return super().from_dict({**config_dict, **given}, **kwargs)

    @classmethod
    def preset(cls, name: str, **settings: Any) -> Self:
        """Returns the config of a model of the paper, the GPT that it describes.

        Args:
            name: ``"350M+PR-MoE-32/64"`` (4.1 billion parameters), ``"1.3B+PR-MoE-64/128"`` (31.4), ``"350M+MoE-128"``
                (13.1), ``"1.3B+MoE-128"`` (52.5), or one of the dense ``"350M"``, ``"1.3B"`` and ``"6.7B"`` (Tables 1
                and 4); the students of both PR-MoEs, the same with ``+L21`` (3.5 and 27, Table 5);
                ``"2.4B+MoE-128"`` (107), ``"8B+MoE-128"`` (349), ``"24B+MoE-128"`` (1,047) and ``"47B+MoE-128"``
                (2,025, Table 6); and, of the ablation, ``"350M+MoE-32"``, ``"350M+Pyramid-MoE-32/64"`` and
                ``"350M+Residual-MoE-32"``.
            settings: Settings that differ from the paper's, such as ``vocab_size``.

        Raises:
            ConfigError: If there is no such model or setting.
        """
        check_known(settings)
        return cls(**{**preset_settings(name), **settings})

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings without ``moe_layers``, which ``experts_per_layer`` implies."""
        found: dict[str, Any] = super().to_dict()
        found.pop("moe_layers", None)
        return found

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # a plan names only what is there
        """Tensor-parallel styles of transformers by module."""
        plan = dict(_ATTENTION_TP)
        ups = ("gate_proj", "up_proj") if self.mlp_gated else ("up_proj",)
        holders = []
        if len(self.moe_layers or ()) < self.num_hidden_layers:
            holders.append("layers.*.mlp")
        if self.moe_layers and self.residual is not None:
            holders.append("layers.*.mlp.residual_mlp")
        for holder in holders:
            plan |= {f"{holder}.{up}": "colwise" for up in ups} | {f"{holder}.down_proj": "rowwise"}
        # Without their biases, which every rank would add to its part of a sum.
        if self.moe_layers and not self.mlp_bias:
            up = {"gate_up_proj": "packed_colwise"} if self.mlp_gated else {"up_proj": "colwise"}
            plan |= {f"layers.*.mlp.experts.{name}": style for name, style in (up | {"down_proj": "rowwise"}).items()}
            plan["layers.*.mlp.experts"] = "moe_tp_experts"
        return plan

    @property
    def base_model_ep_plan(self) -> dict[str, str]:  # type: ignore[override]  # as above
        """Expert-parallel styles of transformers by module."""
        if not self.moe_layers:
            return {}
        names = ["gate_up_proj" if self.mlp_gated else "up_proj", "down_proj"]
        if self.mlp_bias:
            names += [f"{name}_bias" for name in names]
        plan = {f"layers.*.mlp.experts.{name}": "grouped_gemm" for name in names}
        return plan | {"layers.*.mlp.experts": "ep_dispatch_experts"}


def check_known(settings: Mapping[str, Any]) -> None:
    """Checks the names of settings; a config itself keeps those it does not know, as all of transformers' do.

    Raises:
        ConfigError: If `PRMoEConfig` has no such setting.
    """
    known = sorted(field.name for field in dataclasses.fields(PRMoEConfig))
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r} of PRMoEConfig; known: {', '.join(known)}")


def _full_list(experts: list[int] | int, moe_layers: list[int] | None, num_layers: int) -> list[int]:
    """Returns the number of experts of every layer."""
    if isinstance(experts, int):
        layers = list(range(1, num_layers, 2)) if moe_layers is None else moe_layers
        counts = [experts] * len(layers)
        if experts and not layers:
            raise ConfigError(
                f"experts_per_layer {experts} has no layer to go to (moe_layers {moe_layers}, {num_layers} layers): "
                "name some in moe_layers, such as [0], or give experts_per_layer=0 for a dense model"
            )
    elif len(experts) == num_layers:
        layers = [layer for layer, count in enumerate(experts) if count]
        if moe_layers is not None and sorted(moe_layers) != layers:
            raise ConfigError(
                f"moe_layers {moe_layers} contradicts experts_per_layer {experts}, which has experts in layers "
                f"{layers}: leave moe_layers out"
            )
        counts = [experts[layer] for layer in layers]
    else:
        layers, counts = moe_layers or [], experts
        if len(layers) != len(counts) or not counts:
            raise ConfigError(
                f"experts_per_layer has {len(experts)} entries for {num_layers} layers: give one per layer, 0 for a "
                "dense one, or one per entry of moe_layers"
            )
    if len(set(layers)) != len(layers) or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(f"invalid moe_layers {layers}: expected different indices below {num_layers}")
    wrong = [count for count in counts if count < 0]
    if wrong:
        raise ConfigError(f"invalid experts_per_layer {experts}: expected counts of at least 0, got {wrong[0]}")
    full = [0] * num_layers
    for layer, count in zip(layers, counts, strict=True):
        full[layer] = count
    return full


def _check_size(name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise ConfigError(f"invalid {name} {size}: expected at least 1")


def _check_picks(experts_per_layer: list[int], picks: int) -> None:
    if picks < 1:
        raise ConfigError(f"invalid num_experts_per_tok {picks}: expected at least 1")
    for layer, experts in enumerate(experts_per_layer):
        if 0 < experts < picks:
            raise ConfigError(
                f"num_experts_per_tok {picks} is above the {experts} experts of layer {layer} (experts_per_layer "
                f"{experts_per_layer}): pick at most {experts}, or give that layer {picks} experts or 0"
            )
