"""Train and save a mixture of experts whose experts lie on several ranks.

torchrun --nproc-per-node 4 examples/expert_parallel.py
"""

from __future__ import annotations

import sys

import swarm_plugins
import torch
import torch.distributed as dist
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.parallel import clip_gradients, gather_state_dict, parallelism_of, synchronize_gradients

FOLDER = sys.argv[1] if len(sys.argv) > 1 else None


def main() -> None:
    """Trains for five steps on random tokens, and saves if a folder is named."""
    torch.manual_seed(0)  # The same weights on every rank; a loaded checkpoint has them anyway.
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = PRMoEForCausalLM(PRMoEConfig(vocab_size=256, experts_per_layer=[0, 4, 0, 8], **shape))

    # Layer 1 has 4 experts and layer 3 has 8: each gets the largest group that divides them and the ranks.
    swarm_plugins.parallelize(model, ep_size="auto", timeout_s=60)
    if dist.get_rank() == 0:
        for layout in parallelism_of(model).layouts:
            print(f"layer {layout.layer.index}: {layout.layer.num_experts} experts over {layout.ep_size} ranks")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # Each rank has batches of its own.
    for step in range(5):
        tokens = torch.randint(0, 256, (2, 32), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        synchronize_gradients(model)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    state = gather_state_dict(model)  # Every rank takes part; rank 0 gets the tensors.
    if FOLDER and dist.get_rank() == 0:
        model.save_pretrained(FOLDER, state_dict=state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
