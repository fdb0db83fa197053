"""Two models that take turns on one device: while one works, the other's whole training state is elsewhere.

    python examples/actor_critic.py
    python examples/actor_critic.py --away nvme --folder /disk --iterations 20

An actor writes text, a critic foretells its reward (how many tokens are even), and both learn from it: REINFORCE with a
baseline. Random weights, a few seconds on a laptop. `locations()` shows at each turn who has the device.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, nn

import penstock

VOCABULARY, PROMPT, ANSWER, BATCH = 64, 4, 12, 16


def make(kind: type, seed: int, folder: str, **rest: int) -> tuple[nn.Module, penstock.Optimizer]:
    """A small Llama with random weights, and its optimizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        **rest,
    )
    model = kind(config)
    given = torch.optim.AdamW(model.parameters(), lr=3e-3)
    placement = penstock.Placement(nvme_path=folder)
    return model, penstock.prepare(model, given, placement=placement, max_grad_norm=1.0)


@contextmanager
def turn(who: str, optimizer: penstock.Optimizer, away: str) -> Iterator[None]:
    """Bring a training state to the device for the time of the block."""
    optimizer.reload_states()
    report = optimizer.locations()
    print(f"{who:<18} has {report.bytes(tier='device'):>9,} bytes on the device")
    yield
    optimizer.offload_states(to=away)
    assert optimizer.locations().bytes(tier="device") == 0


def learn(optimizer: penstock.Optimizer, loss: Tensor) -> None:
    """One step."""
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def write(actor: nn.Module, optimizer: penstock.Optimizer) -> Tensor:
    """Prompts and answers, [BATCH, PROMPT + ANSWER]; only the parameters are on the device meanwhile."""
    optimizer.offload_states({"grad", "master", "optimizer"}, non_blocking=True)
    actor.eval()
    prompts = torch.randint(1, VOCABULARY, (BATCH, PROMPT))
    with torch.no_grad():
        tokens = actor.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=True,
        )
    actor.train()
    return tokens


def train(iterations: int, away: str, folder: str) -> list[float]:
    """Returns the mean reward of each iteration."""
    actor, actor_optimizer = make(transformers.LlamaForCausalLM, 0, folder)
    critic, critic_optimizer = make(transformers.LlamaForSequenceClassification, 1, folder, num_labels=1)
    critic_optimizer.offload_states(to=away)
    rewards = []
    for iteration in range(iterations):
        with turn("the actor writes,", actor_optimizer, away):
            tokens = write(actor, actor_optimizer)
        answers = tokens[:, PROMPT:]
        reward = (answers % 2 == 0).float().mean(dim=1)  # [BATCH]
        with turn("the critic learns,", critic_optimizer, away):
            foretold = critic(tokens[:, :PROMPT]).logits.squeeze(1).float()  # [BATCH]
            learn(critic_optimizer, (foretold - reward).square().mean())
        with turn("the actor learns,", actor_optimizer, away):
            logits = actor(tokens[:, :-1]).logits[:, PROMPT - 1 :].float()  # [BATCH, ANSWER, VOCABULARY]
            chosen = logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
            learn(actor_optimizer, -((reward - foretold.detach()).unsqueeze(1) * chosen).mean())
        rewards.append(reward.mean().item())
        print(f"iteration {iteration}: reward {rewards[-1]:.3f}\n{actor_optimizer.locations()}")
    actor_optimizer.close()
    critic_optimizer.close()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--away", choices=("cpu", "nvme"), default="cpu", help="where a state waits for its turn")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the files of the nvme tier")
    arguments = parser.parse_args()
    train(arguments.iterations, arguments.away, arguments.folder)
