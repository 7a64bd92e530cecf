"""Updates of FlashSAC against an implementation of its own, written from the paper's equations in plain functions."""

import pytest
import torch
import torch.nn.functional as F
from test_crossq import chunk, learner_of
from test_sac import BOX, OBSERVATION, REWARD, rows

from alfish.algorithms.flashsac import FlashSAC
from alfish.configuration import reading

LEARNING_RATE, TARGET_ENTROPY, NUM_BINS = 0.01, -1.0, 21
GAMMA, TARGET_RATE, ATOMS = 0.99, 0.01, torch.linspace(-5, 5, NUM_BINS)
HEAD = "policy_head.box.linear"
NOISE = 0.3  # in place of each random number of the policy


def shipped(linear_in):
    """FlashSAC as `flashsac.gin` has it, with small networks."""
    sizes = ["critic/Residual.width = 8", "actor/Residual.width = 6", f"Bins.num_bins = {NUM_BINS}"]
    entropy = [f"SAC.box_target_entropy = {TARGET_ENTROPY}", f"Temperatures.linear_in = '{linear_in}'"]
    with reading.preserved():
        reading.read(["flashsac.gin"], sizes + entropy)
        torch.manual_seed(0)
        return FlashSAC(OBSERVATION, BOX, REWARD, noise=None)


class Reference:
    """Parameters and running statistics by the names of SAC's state; networks, losses and Adam as functions of them."""

    def __init__(self, sac):
        self.state = {
            name: value.detach().clone() for name, value in sac.state_dict().items() if torch.is_tensor(value)
        }
        self.trained = [name for name, _ in sac.named_parameters() if not name.startswith("target")]
        self.adam = {name: (torch.zeros_like(self.state[name]),) * 2 + (0,) for name in self.trained}

    def norm(self, name, x, moments):
        """Batch norm: by the batch, whose moments are collected, or by running statistics if `moments` is None."""
        mean, variance = self.state[f"{name}.mean"], self.state[f"{name}.variance"]
        if moments is not None:
            mean, variance = x.mean(-2, keepdim=True), x.var(-2, correction=0, keepdim=True)
            moments[name] = mean.detach(), variance.detach()
        scaled = (x - mean) / (variance + 1e-5).sqrt()
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def body(self, name, x, moments):
        def linear(layer, x):
            weight = self.state[f"{name}.{layer}.weight"]  # [E, in, out] or [out, in]
            return x @ (weight if weight.ndim == 3 else weight.T)

        x = linear("embedding", self.norm(f"{name}.input_norm", x, moments))
        for block in ("blocks.0", "blocks.1"):
            inner = F.relu(self.norm(f"{name}.{block}.1", linear(f"{block}.0", x), moments))
            x = x + F.relu(self.norm(f"{name}.{block}.4", linear(f"{block}.3", inner), moments))
        return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * self.state[f"{name}.output_norm.weight"]

    def logits(self, critic, observation, action, moments):
        x = torch.cat([observation, action], -1).expand(2, -1, -1)
        x = self.body(f"{critic}.body.0", x, moments)
        return x @ self.state[f"{critic}.body.1.weight"] + self.state[f"{critic}.body.1.bias"]

    def act(self, observation, moments):
        x = self.body("actor_mlp", observation, moments)
        mean, log_std = (x @ self.state[f"{HEAD}.weight"].T + self.state[f"{HEAD}.bias"]).chunk(2, -1)
        log_std = -10 + 6 * (1 + torch.tanh(log_std))
        normal = torch.distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * NOISE
        action = torch.tanh(before)
        return action, (normal.log_prob(before) - (1 - action.square()).log()).sum(-1)

    def critic_loss(self, observation, following, action, reward, moments):
        alpha, num_rows = self.state["temperatures.log_alpha.box"].exp(), len(reward)
        with torch.no_grad():
            next_action, log_density = self.act(following, None)
            both, actions = torch.cat([observation, following]), torch.cat([action, next_action])
            next_p = self.logits("target_critic.network", both, actions, {})[:, num_rows:].softmax(-1)
            least = (next_p * ATOMS).sum(-1).argmin(0)
            atoms = reward[:, None] + GAMMA * (ATOMS - alpha * log_density[:, None])
            position = (atoms.clamp(-5, 5) + 5) * (NUM_BINS - 1) / 10
            target = torch.zeros(num_rows, NUM_BINS)
            for row in range(num_rows):
                for p, at in zip(next_p[least[row], row], position[row]):
                    below = min(int(at), NUM_BINS - 2)
                    target[row, below] += p * (below + 1 - at)
                    target[row, below + 1] += p * (at - below)
        logits = self.logits("critic", both, actions, moments)[:, :num_rows]
        return -(target * logits.log_softmax(-1)).sum(-1).mean(-1).sum()

    def actor_losses(self, observation, following, linear_in, moments):
        action, log_density = self.act(torch.cat([observation, following]), moments)
        action, log_density = action[: len(observation)], log_density[: len(observation)]
        q = (self.logits("critic", observation, action, None).softmax(-1) * ATOMS).sum(-1).amin(0)
        log_alpha = self.state["temperatures.log_alpha.box"]
        weight = log_alpha.exp() if linear_in == "alpha" else log_alpha
        excess = (-log_density).mean().detach() - TARGET_ENTROPY
        return (log_alpha.exp().detach() * log_density - q).mean(), weight * excess

    def step(self, name, gradient):
        first, second, count = self.adam[name]
        first, second, count = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square(), count + 1
        self.adam[name] = first, second, count
        root = (second / (1 - 0.999**count)).sqrt() + 1e-8
        self.state[name] = self.state[name] - LEARNING_RATE * first / (1 - 0.9**count) / root

    def project(self, name):
        """Gives a parameter, and the offsets that go with it, the norm they keep."""
        layer, _, kind = name.rpartition(".")
        value, bias = self.state[name], self.state.get(f"{layer}.bias")
        if kind != "weight":
            return
        if layer in (HEAD, "critic.body.1") or layer.endswith(("embedding", ".0", ".3")):
            self.state[name] = value / value.norm(dim=1, keepdim=True)
            return
        square = value.square().sum(-1, keepdim=True) + (0 if bias is None else bias.square().sum(-1, keepdim=True))
        factor = (value.shape[-1] / square).sqrt()
        self.state[name] = value * factor
        if bias is not None:
            self.state[f"{layer}.bias"] = bias * factor

    def update(self, experience, linear_in, trains_actor):
        observation, following = experience.time_step.observation
        moments = {}
        for name in self.trained:
            self.state[name] = self.state[name].requires_grad_()
        losses = [
            self.critic_loss(observation, following, experience.action[0], experience.time_step.reward[1], moments)
        ]
        if trains_actor:
            losses += self.actor_losses(observation, following, linear_in, moments)
        gradients = {}
        for loss, group in zip(losses, ("critic", ("actor", "policy"), "temperatures")):
            names = [name for name in self.trained if name.startswith(group)]
            gradients |= zip(names, torch.autograd.grad(loss, [self.state[name] for name in names], retain_graph=True))
        assert len(gradients) == len(self.trained) or not trains_actor
        self.state = {name: value.detach() for name, value in self.state.items()}
        for name, gradient in gradients.items():
            self.step(name, gradient)
        for name, pair in moments.items():
            for kind, value in zip(("mean", "variance"), pair):
                old = self.state[f"{name}.{kind}"]
                self.state[f"{name}.{kind}"] = old + 0.01 * (value.view_as(old) - old)
        for name in gradients:
            self.project(name)
        for name in self.trained:
            target = name.replace("critic", "target_critic.network", 1)
            if name.startswith("critic"):
                self.state[target] = self.state[target] + TARGET_RATE * (self.state[name] - self.state[target])


@pytest.mark.parametrize("linear_in", ["alpha", "log_alpha"])
def test_six_updates_match_the_paper(linear_in, monkeypatch):
    sac = shipped(linear_in)
    reference, learner = Reference(sac), learner_of(sac, learning_rate=LEARNING_RATE)
    monkeypatch.setattr(torch, "randn_like", lambda like: torch.full_like(like, NOISE))
    for k in range(6):
        experience = rows(BOX, num_windows=8, seed=k)
        reference.update(experience, linear_in, trains_actor=k % 2 == 1)
        learner.train(chunk(experience))
        found = sac.state_dict()
        for name, value in reference.state.items():
            if not (name.startswith("target") and name.endswith(("mean", "variance"))):  # no one reads these
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
