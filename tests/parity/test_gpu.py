"""A client whose local weights and adapters are on a GPU, with servers on the CPU."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True),
]
IDS = torch.tensor([[0, 17, 99, 23], [31, 64, 9, 88]])
MASK = (IDS != 0).long()
# Embedding, norm and head are computed by other kernels than on the CPU.
FP32 = {"atol": 1e-4, "rtol": 1e-4}


@torch.no_grad()
def test_outputs_come_back_to_the_gpu(pair) -> None:
    remote = pair.load_remote(device="cuda")
    assert remote.model.layers[0].self_attn.q_proj.weight.device.type == "cuda"
    got = remote(IDS.cuda(), attention_mask=MASK.cuda(), output_hidden_states=True)
    want = pair.local(IDS, attention_mask=MASK, output_hidden_states=True)
    assert {state.device.type for state in got.hidden_states} == {"cuda"}
    real = MASK.bool()
    torch.testing.assert_close(got.logits.cpu()[real], want.logits[real], **FP32)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generation_works_on_the_gpu(pair, options: dict[str, int]) -> None:
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    want = pair.local.generate(IDS, **options)
    options["attention_mask"] = MASK.cuda()
    assert torch.equal(pair.load_remote(device="cuda").generate(IDS.cuda(), **options).cpu(), want)


def test_adapters_on_the_gpu_get_their_gradients(pair) -> None:
    gradients = []
    for model in (pair.load_remote(device="cuda"), pair.load_local().cuda()):
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        tuned(IDS.cuda(), attention_mask=MASK.cuda(), labels=IDS.cuda()).loss.backward()
        gradients.append({name: p.grad for name, p in tuned.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.device.type == "cuda"
        torch.testing.assert_close(gradient, gradients[1][name], **FP32)
