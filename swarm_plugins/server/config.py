"""Settings of a server. Imports nothing heavy: the command checks them before anything else."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from swarm_plugins.borders import NO_TIES, check_borders, nearest_border, pieces
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.limits import MAX_ALSO
from swarm_plugins.weights.names import KERNELS, QUANTIZATIONS, check_kv_bits

DTYPES = ("float32", "bfloat16", "float16")
MIN_REQUEST_BYTES = 16 << 20
"""Least budget for requests."""
LEAST_ACTIVATION_BYTES = 512 << 20
"""Least budget for graphs that a server chooses itself."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(NodeConfig):
    """What to serve, how to join the swarm, and how much clients may use.

    `swarm serve` has an option for each field: its docstring is the option's help.
    """

    model: str
    """Directory, or id of a repository on the Hub."""

    revision: str | None = None
    """Branch, tag or commit on the Hub. None: ``main``."""

    also_versions: tuple[str, ...] = field(default=(), metadata={"as_typed": True})  # paths may have blanks
    """Other versions of the model: revisions on the Hub, ``REPO@REVISION`` or directories. Blocks that are the same
    there are served to their users too. Branches are looked at again every ten minutes."""

    blocks: range | None = None
    """The span. None: chosen, see ``num_blocks``."""

    part: tuple[int, int] | None = None
    """``(k, n)``: the k-th, from 1, of n equal parts of the model. An alternative to ``blocks``."""

    num_blocks: int | None = None
    """Serve this many blocks, those the swarm lacks most. None, without ``blocks``: as many as memory holds."""

    experts: range | None = None
    """Experts of each block to hold. None: all, or with ``remote_experts`` none."""

    slice: tuple[int, int] | None = None
    """The k-th, from 0, of n equal parts of each expert's inner dimension, to hold instead of whole experts."""

    remote_experts: bool = False
    """Serve the blocks themselves, and fetch the experts that are not held here from other peers."""

    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:INDEX``."""

    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16``. None: the checkpoint's."""

    quantization: str = "none"
    """How the weights are kept: ``none``, ``int8``, ``int4`` or ``nf4``."""

    kernel: str | None = None
    """How a CPU forms products: ``plain``, ``halves`` or ``onednn`` in float32, ``plain``, ``gemv`` (bfloat16),
    ``fp16`` or ``onednn`` in 16 bits, ``int_mm`` or ``fbgemm`` in int8. None: what is fastest here. Name one to repeat
    another server's numbers."""

    offload: OffloadConfig | None = None
    """Keep experts on disk, and as many in memory as fit these budgets. None: all weights are loaded."""

    kv_bytes: int = 1 << 30
    """Memory for the keys and values of all sessions."""

    kv_bits: int | None = None
    """8: sessions keep keys and values as codes of 8 bits, with a scale for each token of each head: up to four times
    as many tokens in the same memory, with a small error. None: as wide as blocks compute."""

    share_prefixes: bool = False
    """Whether clients get what others' sessions have begun with, and do not wait for it to be computed again. How soon
    an answer comes then tells what others have sent: for private swarms. By default each client gets its own."""

    activation_bytes: int | None = None
    """Memory for forward graphs kept for the backward to come; 0 keeps none. None: a quarter of the memory that is
    free after loading, without caches and adapters; at least 512 MiB, 16 GiB at most."""

    adapter_bytes: int = 1 << 29
    """Memory for the adapters that clients upload."""

    request_bytes: int | None = None
    """Memory for the requests of all clients while they are received, worked on and answered. None: a quarter of the
    memory that is free after loading, 4 GiB at most."""

    run_bytes: int | None = None
    """Memory of one running forward or backward besides its inputs and outputs; larger ones are cut. None: like
    ``request_bytes``."""

    points: Path | None = None
    """File of what other identities have computed for this server, and it for them. None: beside ``identity``, with
    ``.points`` at the end of its name; without an identity, nothing is kept."""

    adapters: tuple[str, ...] = ()
    """Published adapters to keep loaded: directories, or ``REPO`` or ``REPO@TAG`` on the Hub."""

    max_batch_tokens: int = 16_384
    """Largest batch of one request, in tokens: its rows times their length."""

    max_session_tokens: int = 32_768
    """Longest sequence of a session."""

    announce_every_s: float = field(default=20.0, metadata={"hidden": True})
    """Seconds between announcements."""

    drain_s: float = 30.0
    """Seconds that open sessions may take to end when the server is asked to end; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_client:
            raise ConfigError(
                "host_maddrs is empty: a server needs an address to listen on, such as /ip4/0.0.0.0/tcp/0, or a relay"
            )
        if not self.model:
            raise ConfigError("model is empty: give a directory or the id of a repository on the Hub")
        given = list(self._span_choices())
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other: give only one")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise ConfigError(f"invalid part {self.part[0]}/{self.part[1]}: expected K/N with 1 <= K <= N")
        if self.blocks is not None and (self.blocks.step != 1 or not 0 <= self.blocks.start < self.blocks.stop):
            raise ConfigError(
                f"invalid blocks {self.blocks.start}:{self.blocks.stop}: expected START:END with 0 <= START < END"
            )
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"unknown quantization {self.quantization!r}; known: {', '.join(QUANTIZATIONS)}")
        if self.kernel is not None and self.kernel not in KERNELS:
            raise ConfigError(f"unknown kernel {self.kernel!r}; known: {', '.join(KERNELS)}")
        check_kv_bits(self.kv_bits)
        self._check_experts()
        self._check_numbers()

    @property
    def points_file(self) -> Path | None:
        """Where points are kept; None: not at all."""
        if self.points is not None or self.identity is None:
            return self.points
        return self.identity.with_name(f"{self.identity.name}.points")

    @property
    def set_aside_bytes(self) -> int:
        """Memory that caches and graphs may take, as far as it is known before loading."""
        graphs = LEAST_ACTIVATION_BYTES if self.activation_bytes is None else self.activation_bytes
        return self.kv_bytes + graphs

    @property
    def is_holder(self) -> bool:
        """Whether only experts are served."""
        return self.experts is not None and not self.remote_experts

    def _check_experts(self) -> None:
        held, part = self.experts, self.slice
        if held is not None and (held.step != 1 or not 0 <= held.start < held.stop):
            raise ConfigError(f"invalid experts {held.start}:{held.stop}: expected FIRST:END with 0 <= FIRST < END")
        if part is not None and not 0 <= part[0] < part[1]:
            raise ConfigError(f"invalid slice {part[0]}/{part[1]}: expected K/N with 0 <= K < N")
        if part is not None and not self.is_holder:
            raise ConfigError(
                f"slice {part[0]}/{part[1]} divides experts that are hosted alone: name them as FIRST:END "
                "(on the command line, --experts FIRST:END), without remote ones"
            )
        if held is None and not self.remote_experts:
            return
        if self.quantization != "none" and part is not None:
            raise ConfigError(
                f"quantization is {self.quantization!r} and slice {part[0]}/{part[1]}: slices are kept as wide as they "
                "are stored; leave out one of the two"
            )
        if self.quantization != "none" and self.is_holder and self.offload is not None:
            raise ConfigError(
                f"quantization is {self.quantization!r} and experts are offloaded: give their width with the budget "
                "(bits=4 in --offload), and leave quantization at 'none'"
            )
        if self.offload is not None and held is None:
            raise ConfigError("offload is given and no expert is held here: leave it out, or name experts to hold")
        if self.is_holder:
            self._check_holder()

    def _check_holder(self) -> None:
        """Checks what is given where only experts are served."""
        if self.blocks is None and self.part is None:
            raise ConfigError("experts are given without blocks: name the blocks that they belong to")
        if self.kv_bits is not None:
            raise ConfigError(
                f"kv_bits is {self.kv_bits} and only experts are served, which have no sessions: give it where the "
                "blocks are"
            )
        if self.adapters:
            raise ConfigError("adapters are given and only experts are served: preload them where the blocks are")

    def _span_choices(self) -> Iterator[str]:
        if self.blocks is not None:
            yield f"blocks {self.blocks.start}:{self.blocks.stop}"
        if self.part is not None:
            yield f"part {self.part[0]}/{self.part[1]}"
        if self.num_blocks is not None:
            yield f"num_blocks {self.num_blocks}"

    def _check_numbers(self) -> None:
        if len(self.also_versions) > MAX_ALSO:
            raise ConfigError(f"also_versions has {len(self.also_versions)} entries, at most {MAX_ALSO}: give fewer")
        for name in ("request_bytes", "run_bytes"):
            value = getattr(self, name)
            if value is not None and value < MIN_REQUEST_BYTES:
                raise ConfigError(
                    f"{name} is {value}, expected at least {MIN_REQUEST_BYTES}: hardly any request would fit"
                )
        for name in ("kv_bytes", "max_batch_tokens", "max_session_tokens", "announce_every_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("activation_bytes", "adapter_bytes", "drain_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value!r}")

    def span_of(self, num_blocks: int, tied: Collection[int] = NO_TIES) -> range | None:
        """Returns the span that the settings name in a model; None if they leave the choice.

        Args:
            num_blocks: Blocks of the model.
            tied: Those that only run behind the one before; parts are cut elsewhere.

        Raises:
            ConfigError: If the model lacks these blocks, or they do not run apart from the others.
        """
        if self.num_blocks is not None and self.num_blocks > num_blocks:
            raise ConfigError(f"num_blocks is {self.num_blocks}, {self.model} has only {num_blocks} blocks: give fewer")
        if self.part is not None:
            index, count = self.part
            if count > num_blocks:
                raise ConfigError(f"{self.model} has {num_blocks} blocks: they cannot be cut into {count} parts")
            ends = (nearest_border(part * num_blocks // count, tied) for part in (index - 1, index))
            if not (part := range(*ends)):
                number = len(pieces(range(num_blocks), tied))
                raise ConfigError(
                    f"{self.model} cannot be cut into {count} parts: {number} pieces of its {num_blocks} blocks run "
                    "apart from each other"
                )
            return part
        if self.blocks is not None and self.blocks.stop > num_blocks:
            raise ConfigError(
                f"blocks {self.blocks.start}:{self.blocks.stop} are out of range: {self.model} has blocks "
                f"0:{num_blocks}"
            )
        if self.blocks is not None:
            check_borders(self.blocks, tied, num_blocks)
        return self.blocks
