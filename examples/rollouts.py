"""An RL-style loop over a live transformers model: rollouts by our engine, a reward, a policy-gradient step, again.

    python examples/rollouts.py [--model FOLDER] [--steps N]

`dsbd_cli.generate` reads the weights as they stand, so every rollout is drawn from the policy of the last step, and it
leaves the model in training mode. The reward here is a toy: the share of even token ids.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dsbd_cli

GROUP = 16  # rollouts of one prompt


def policy(folder: str | None) -> torch.nn.Module:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=2, pad_token_id=0))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default=None)
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    torch.manual_seed(0)
    model = policy(args.model).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompt = torch.tensor([[5, 6, 7, 8]])
    for step in range(args.steps):
        out = dsbd_cli.generate(model, prompt.repeat(GROUP, 1), do_sample=True, top_k=0, max_new_tokens=12)
        new = out[:, prompt.shape[1] :]
        held = new != 0  # padding behind an end
        reward = ((new % 2 == 0) & held).sum(1) / held.sum(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        logits = model(input_ids=out).logits[:, prompt.shape[1] - 1 : -1]
        logprob = logits.log_softmax(-1).gather(2, new.unsqueeze(2)).squeeze(2)
        loss = -(advantage.unsqueeze(1) * logprob * held).sum(1).mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        print(f"step {step}: reward {reward.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
