"""Headers of GGUF files against gguf-py, which writes them; and such that lie."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.checkpoint.gguf.header import GgufHeader, ShortHeaderError, parse_gguf
from swarm_plugins.errors import CheckpointError, SwarmError, UnsupportedError

gguf: Any = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b c", "\u00e9"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_string("general.name", "toy")
    writer.add_bool("toy.flag", True)
    generator = np.random.default_rng(0)
    writer.add_tensor("plain", generator.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("half", generator.normal(size=7).astype(np.float16))
    wide = generator.normal(size=(2, 4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("experts", gguf.quants.quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parsed(data: bytes) -> GgufHeader:
    return parse_gguf(data, "model.gguf", len(data))


def test_it_says_what_gguf_py_reads(written: Path) -> None:
    data = written.read_bytes()
    found, theirs = parsed(data), gguf.GGUFReader(written)
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["general.name"] == "toy"
    assert found.metadata["toy.flag"] is True
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert "tokenizer.ggml.tokens" not in found.metadata
    for ours, other in zip(found.tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.kind, ours.start) == (other.name, other.tensor_type.name, other.data_offset)
        assert list(ours.shape) == other.shape.tolist()[::-1]
        assert data[ours.start : ours.end] == other.data.tobytes()


def test_a_part_of_it_asks_for_more(written: Path) -> None:
    data = written.read_bytes()
    end = parsed(data).num_bytes
    for length in (0, 3, 10, 23, 24, 100, end - 1):
        with pytest.raises(ShortHeaderError):
            parse_gguf(data[:length], "model.gguf", len(data))
    assert parse_gguf(data[:end], "model.gguf", len(data)) == parsed(data)


def test_a_truncated_file_is_refused(written: Path) -> None:
    data = written.read_bytes()
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'experts' ends at byte \d+"):
        parse_gguf(data, "model.gguf", len(data) - 1)


def header(*tensors: tuple[str, tuple[int, ...], int, int]) -> bytes:
    """Returns a header of tensors, each with name, sizes, type and offset."""
    listed = b"".join(
        struct.pack(f"<Q{len(name)}s", len(name), name.encode())
        + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        for name, sizes, kind, offset in tensors
    )
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + listed


def setting(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def with_settings(*found: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(found)) + b"".join(found)


def test_many_strings_in_several_lists_are_refused() -> None:
    """Each list kept to its limit, and all of them took minutes."""
    num = 1 << 20
    lists = [setting(b"%d" % one, 9, struct.pack("<IQ", 8, num) + bytes(8 * num)) for one in range(3)]
    with pytest.raises(CheckpointError, match="list of 1048576 values of type 8, which is not read"):
        parsed(with_settings(*lists))


def test_long_texts_are_neither_kept_nor_repeated() -> None:
    long = text(b"a" * 100_000)
    assert parsed(with_settings(setting(b"template", 8, long), setting(b"b", 8, text(b"c")))).metadata == {"b": "c"}
    with pytest.raises(CheckpointError, match=r"a name in the header .* has 100000 bytes, expected at most 65535"):
        parsed(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + long + bytes(20))
    with pytest.raises(CheckpointError, match="alignment 'aaaa") as caught:
        parsed(with_settings(setting(b"general.alignment", 8, text(b"a" * 60_000))))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(20), "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "of version 9; known: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "expected at most 65536 of each"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "expected at most 65536 of each"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + bytes(9), "expected at most"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1),
            "list of 1 values of type 9, which is not read",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 1 << 60), "values of type 8, which is not read"),
        (header(("a", (32,) * 5, 0, 0)), "has 5 dimensions"),
        (header(("a", (33, 2), 8, 0)), "not whole blocks of 32"),
        (header(("a", (0, 2), 0, 0)), r"shape \[0, 2\]"),
        (header(("a", (1 << 60,), 0, 0)), "shape"),
        (header(("a", (32,), 0, 0), ("b", (32,), 0, 64)), "in the same bytes"),
        (header(("a", (32,), 0, 0), ("a", (32,), 0, 128)), "lists a tensor twice"),
    ],
)
def test_what_lies_is_refused_in_one_sentence(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_gguf(data + bytes(64), "model.gguf", None)
    assert "\n" not in str(caught.value)


def test_types_that_are_not_read_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"type number 16; known: F32, .*Q6_K"):
        parsed(header(("a", (256, 2), 16, 0)) + bytes(1000))


@settings(deadline=None, max_examples=200)
@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_any_other_byte_is_another_header_or_one_error(written: Path, place: int, value: int) -> None:
    data = bytearray(written.read_bytes())
    data[place] = value
    with contextlib.suppress(SwarmError, ShortHeaderError):
        parse_gguf(bytes(data), "model.gguf", len(data))
