"""Servers that are asked to end: open sessions end first, new ones go elsewhere, a second signal is final."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from programs import Programs
from serve_kit import ADDRESS, found_in_line, serving
from transformers import AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.cli import app
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.identity import create_identity_file, load_identity

IDS = torch.tensor([[5, 17, 99, 23]])
END_S = 100.0


def states_seen_from(address: str) -> dict[str, str]:
    status = CliRunner().invoke(app, ["status", "--json", "--initial-peers", address, "--timeout", "20"])
    return {server["peer"]: server["state"] for server in json.loads(status.output)[0]["servers"]}


def drain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["drain", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.swarm
@torch.no_grad()
def test_sessions_end_first_and_a_second_signal_is_final(tmp_path: Path, programs: Programs) -> None:
    directory = save_tiny("llama", tmp_path / "tiny-llama")
    key, other_key, log, second_log = (tmp_path / name for name in ("server.key", "other.key", "1.log", "2.log"))
    create_identity_file(other_key)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    options = ["--identity", str(key), "--log-format", "json", "--log-level", "info", "--drain-s", "120"]
    with serving(programs, directory, log, "--blocks", "0:4", *options) as one:
        address = found_in_line(one, ADDRESS, log)
        model = AutoSwarmModelForCausalLM.from_pretrained(
            directory, initial_peers=[address], swarm=SwarmConfig(refresh_s=0.5)
        )
        cache = DynamicCache(config=model.config)
        tokens = model(IDS, past_key_values=cache).logits[:, -1:].argmax(-1)

        code, text = drain(address, "--identity", str(other_key))
        assert code == 2
        assert f"is the identity of {load_identity(other_key).peer_id}, not of" in text
        code, text = drain(address, "--identity", str(key))
        assert code == 0, text
        assert "drains; open sessions: 1; it ends when they have, 120 s from now at the latest." in text
        with serving(programs, directory, second_log, "--blocks", "0:4", "--initial-peers", address) as two:
            second = found_in_line(two, ADDRESS, second_log)
            for _ in range(4):
                tokens = torch.cat([tokens, model(tokens[:, -1:], past_key_values=cache).logits.argmax(-1)], dim=1)
            want = local.generate(IDS, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert tokens.tolist() == want[:, 4:].tolist()
            states = states_seen_from(second)
            assert sorted(states.values()) == ["draining", "online"]
            # A new session goes to the other server; the old one has not moved.
            new = DynamicCache(config=model.config)
            time.sleep(0.6)
            model(IDS, past_key_values=new)
            holders = [one.layers[0].state._session._spans[0].peer for one in (cache, new)]
            assert [states[peer] for peer in holders] == ["draining", "online"]
            assert one.poll() is None
            cache.reset()
            assert one.wait(END_S) == 0
            for line in log.read_text().splitlines():
                assert {"time", "level", "logger", "message"} <= json.loads(line).keys()

            # As Ctrl-C in a terminal does it, and service managers.
            os.killpg(two.pid, signal.SIGINT)
            time.sleep(1.0)
            assert two.poll() is None
            two.terminate()
            assert two.wait(END_S) == 0
            assert "drains; open sessions: 1; it ends when they have, after 30 s" in (told := second_log.read_text())
            assert "daemon" not in told
        connect([address], SwarmConfig(refresh_s=0.5)).close()


def test_a_peer_id_needs_a_way_to_it_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    code, text = drain("QmServer", "--identity", str(tmp_path / "none"))
    assert code == 2
    assert "'QmServer' is a peer id: give the server's address instead, or --initial-peers" in text
    code, text = drain("/ip4/127.0.0.1/tcp/9/p2p/QmServer", "--identity", str(tmp_path / "none"))
    assert code == 2
    assert f"cannot read identity {tmp_path}" in text
