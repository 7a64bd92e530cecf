"""A memory with attention to the last rows of the episode."""

from typing import Annotated, Any, TypeAlias

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.networks.layers import linear
from alfish.networks.memory import Memory
from alfish.parameters import PositiveInt, Range, checked

# Normalized features of the W - 1 previous rows, oldest first, [B, W-1, F], zeros where the episode has no such row;
# and the number of previous rows of the episode in the window, [B] int32.
State: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@gin.configurable(module="alfish.networks")
@checked
class AttentionWindow(Memory):
    """Attention of each row to the last W rows of its episode, including itself.

    The memory is one pre-norm transformer block. Its first part is multi-head attention with a learned bias for each
    distance and head, which encodes positions. Its second part has two linear layers with a ReLU and 2 H features in
    between. Each part has a residual connection. `StackedMemory.layers = [@AttentionWindow, @AttentionWindow]` stacks
    blocks.

    The state holds normalized features instead of keys and values. Features take half as much space, and stay valid
    when the weights of keys and values change. These weights also receive gradients from rows before the unroll. A
    single step multiplies the query by the weights of keys, and the weighted sum of rows by the weights of values,
    instead of multiplying each row.

    Consecutive rows are computed at once, with T x (W - 1 + T) products for each column and head.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; biases of distances: Raffel et al., 2020,
    https://arxiv.org/abs/1910.10683; root mean square without learned weights: Zhang & Sennrich, 2019.

    Args:
      input_size: number of input features, F.
      size: number of output features, H, a multiple of `num_heads`.
      length: number of rows of the window, W, the row itself included; at least 2.
      num_heads: number of heads, with H / num_heads features each.

    Raises:
      UsageError: `size` is not a multiple of `num_heads`.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        size: PositiveInt = 64,
        length: Annotated[int, Range(2)] = 64,
        num_heads: PositiveInt = 4,
    ):
        super().__init__()
        if size % num_heads:
            raise UsageError(
                f"AttentionWindow.size is {size}, which is not a multiple of AttentionWindow.num_heads = {num_heads}; "
                "change one of them"
            )
        self.output_size = size
        self._input_size = input_size
        self._length = length
        self._num_heads = num_heads
        self.query: Any = linear(input_size, size, 1.0)
        # A bias of keys would have no effect, and a bias of values would only add to the bias of the output.
        self.key: Any = linear(input_size, size, 1.0, bias=False)
        self.value: Any = linear(input_size, size, 1.0, bias=False)
        self.output = linear(size, size, 1.0)
        self.skip = nn.Identity() if input_size == size else linear(input_size, size, 1.0, bias=False)
        self.up = linear(size, 2 * size)
        self.down = linear(2 * size, size, 1.0)
        self.position_bias = nn.Parameter(torch.zeros(num_heads, length))  # bias of each row of a window, oldest first
        self._scale = (size // num_heads) ** -0.5

    def initial_state(self, batch_size: int) -> State:
        return (
            torch.zeros(batch_size, self._length - 1, self._input_size),
            torch.zeros(batch_size, dtype=torch.int32),
        )

    def step(self, features: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        kept, count = state
        rows = torch.cat([kept, _normalized(features).unsqueeze(1)], 1)  # [B, W, F]
        query = self._heads(self.query(rows[:, -1])).transpose(0, 1)  # [heads, B, D]
        query = torch.bmm(query, self.key.weight.unflatten(0, (self._num_heads, -1)))  # [heads, B, F]
        score = self._scale * torch.bmm(rows, query.permute(1, 2, 0))  # [B, W, heads]
        distance = torch.arange(self._length - 1, -1, -1, device=features.device)
        visible = (distance <= count.unsqueeze(-1)).unsqueeze(-1)
        score = torch.where(visible, score + self.position_bias.T, -torch.inf)
        mean = torch.bmm(torch.softmax(score, 1).transpose(1, 2), rows)  # [B, heads, F]
        weight = self.value.weight.unflatten(0, (self._num_heads, -1)).transpose(1, 2)  # [heads, F, D]
        value = torch.bmm(mean.transpose(0, 1), weight).transpose(0, 1).flatten(1)
        return self._output(features, value), (rows[:, 1:], (count + 1).clamp(max=self._length - 1))

    def rows(self, features: torch.Tensor, state: State, step_type: torch.Tensor) -> tuple[torch.Tensor, State]:
        kept, count = state
        num_rows, before = len(features), self._length - 1
        normalized = _normalized(features)
        rows = torch.cat([kept.transpose(0, 1), normalized])  # [K, N, F], K = W - 1 + T
        # The number of FIRST rows up to a row identifies its episode; -1 means no row.
        episode = (step_type == StepType.FIRST).cumsum(0)  # [T, N]
        distance = torch.arange(before, 0, -1, device=features.device).unsqueeze(-1)
        episodes = torch.cat([-(distance > count).to(episode.dtype), episode])  # [K, N]
        query, key, value = (
            self._heads(part).permute(1, 2, 0, 3)  # [N, heads, T or K, D]
            for part in (self.query(normalized), self.key(rows), self.value(rows))
        )
        bias = self._bias(episode, episodes)
        found = F.scaled_dot_product_attention(query, key, value, bias, scale=self._scale)
        output = self._output(features, found.permute(2, 0, 1, 3).flatten(2))
        stays = episodes[num_rows:] == episode[-1]  # [W-1, N], whether a row is in the episode of the last row
        kept = torch.where(stays.unsqueeze(-1), rows[num_rows:], 0.0).transpose(0, 1)
        return output, (kept, stays.sum(0).to(count.dtype))

    def _bias(self, episode: torch.Tensor, episodes: torch.Tensor) -> torch.Tensor:
        """Returns the bias `[N, heads, T, K]` of scores: the bias of the distance; -inf outside the episode or window.

        Args:
          episode: episodes of the rows that attend, `[T, N]`.
          episodes: episodes of the rows attended to, `[K, N]`.
        """
        row = torch.arange(len(episode), device=episode.device).unsqueeze(-1) + self._length - 1
        distance = row - torch.arange(len(episodes), device=episode.device)  # [T, K]
        near = (distance >= 0) & (distance < self._length)
        visible = near & (episode.T.unsqueeze(-1) == episodes.T.unsqueeze(1))  # [N, T, K]
        bias = self.position_bias[:, (self._length - 1 - distance).clamp(0, self._length - 1)]  # [heads, T, K]
        return torch.where(visible.unsqueeze(1), bias, -torch.inf)

    def _heads(self, features: torch.Tensor) -> torch.Tensor:
        return features.unflatten(-1, (self._num_heads, -1))

    def _output(self, features: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = self.skip(features) + self.output(value)
        return x + self.down(torch.relu(self.up(_normalized(x))))


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Scales features to mean square 1; zeros stay zeros."""
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()
