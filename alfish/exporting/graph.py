"""The graph of a policy's step: operations, weights, inputs, random numbers and outputs.

All formats are written from this graph. Its shapes are fixed: it takes one observation, without batch dimension.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from alfish.compiler.numpy_operations import DISTRIBUTIONS, DRAWS, LAYOUT
from alfish.compiler.tracer import is_random, record
from alfish.errors import UsageError, first_line
from alfish.exporting.policy_step import ExportedLeaf, PolicyStep
from alfish.runs import random_state
from alfish.training.policy import Policy

aten = torch.ops.aten

# Operations that read only the shapes and dtypes of their tensors.
FILLED = {
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
}  # fmt: skip


class NotExportable(UsageError):
    """Raised if the policy contains something that a format cannot express.

    The message names the module and the reason.
    """


# Smallest number from which exponential noise is computed; half the distance of torch's uniform float32 numbers. The
# logarithm of 0, which uniform numbers may be, is infinite.
SMALLEST_UNIFORM = 2.0**-25


class Noise(NamedTuple):
    """Random numbers that one step of a policy draws.

    Attributes:
      leaf: name and shape of the random numbers.
      distribution: name of their distribution, a key of `numpy_operations.DRAWS`.
      bounds: bounds of random integers: low and high, or only high.
      is_read: whether an action or a next state depends on the numbers.
    """

    leaf: ExportedLeaf
    distribution: str
    bounds: tuple[int, ...]
    is_read: bool

    def draw(self) -> torch.Tensor:
        """Draws the numbers from torch's global generator, as the policy does."""
        example = self.leaf.example
        return DRAWS[self.distribution](torch.empty(example.shape, dtype=example.dtype), *self.bounds)


class PolicyGraph:
    """Graph of one step of a policy.

    Args:
      policy: policy on the CPU.
      sample: whether actions are sampled, as in training; otherwise the mode is used.

    Attributes:
      graph: the graph. Its placeholders are the constants, `inputs`, and the noise that is read. Its results are the
        leaves of the action and the leaves of the next state.
      constants: weights, buffers and other constants, by name.
      inputs: leaves that the step reads: observations, `first`, `reward`, and state.
      noise: random numbers, in the order in which torch draws them.
      actions: leaves of the action.
      state: leaves of the state on which actions depend, with their initial values.
      observation_space, action_space: spaces of one environment.

    Raises:
      NotExportable: the step cannot be recorded.
    """

    def __init__(self, policy: Policy, sample: bool = False):
        step = PolicyStep(policy, sample)
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.actions = step.outputs
        tracker = _ModuleNames(policy)

        def flat(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            actions, state = step(leaves)
            return [*actions, *state]

        try:
            with random_state.preserved(), tracker.tracking(), WithoutChecks():
                examples = [leaf.example.clone() for leaf in step.inputs]
                self.graph = record(flat, examples, tracker.place, captures=True)
        except Exception as error:  # the user's modules may raise anything
            raise NotExportable(f"{tracker.place()} cannot be exported: {first_line(error)}") from error
        self._keep_what_actions_need(step)
        self._take_constants(tracker.names)
        self._take_noise()
        self.graph.eliminate_dead_code()
        _sort_placeholders(self.graph, [*self.constants, *(leaf.name for leaf in self.inputs)])

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> list[torch.fx.Node]:
        """Nodes of the action, then of the next state."""
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        return list(output.args[0])

    @property
    def read_noise(self) -> list[Noise]:
        return [noise for noise in self.noise if noise.is_read]

    def _keep_what_actions_need(self, step: PolicyStep) -> None:
        """Removes leaves of the state that do not affect actions, and inputs that are then unused."""
        nodes = self.placeholders
        names = [leaf.name for leaf in step.inputs]
        for node, name in zip(nodes, names):
            node.meta["name"] = name
        for node in self.graph.nodes:  # random operations read only shapes, which are known
            if is_random(node):
                node.args = tuple(None if isinstance(one, torch.fx.Node) else one for one in node.args)
        actions, after = self.results[: len(self.actions)], self.results[len(self.actions) :]
        after_of = dict(zip(nodes[-len(after) :] if after else [], after))
        needed = _ancestors(actions)
        while len(grown := _ancestors([*actions, *(after_of[node] for node in after_of if node in needed)])) > len(
            needed
        ):
            needed = grown
        carried = [node for node in after_of if node in needed]
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        output.args = ([*actions, *(after_of[node] for node in carried)],)
        by_name = dict(zip(names, step.inputs))
        self.inputs = [by_name[node.meta["name"]] for node in nodes if node in needed]
        self.state = [by_name[node.meta["name"]] for node in carried]
        # Random operations stay in the graph, because each one advances torch's generator.
        self.graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
        for node in nodes:
            if node not in needed:
                self.graph.erase_node(node)

    def _take_constants(self, names: dict[int, str]) -> None:
        """Replaces every tensor that does not depend on inputs with a placeholder."""
        self.constants: dict[str, torch.Tensor] = {}
        values: dict[torch.fx.Node, torch.Tensor] = {}
        for node in list(self.graph.nodes):
            if node.op != "call_function" or is_random(node):
                continue
            if node.target is aten.lift_fresh.default:
                values[node] = node.meta["val"].detach()
            elif node.target in FILLED:
                like, *rest = node.args
                values[node] = node.target(like.meta["val"], *rest, **node.kwargs)
            elif not node.all_input_nodes:
                values[node] = node.target(*node.args, **node.kwargs)
        for node, value in values.items():
            name = names.get(id(node.meta["val"]), f"constant_{len(self.constants)}")
            self.constants[name] = value
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                placeholder = self.graph.placeholder(f"constant_{len(self.constants)}")
            placeholder.meta |= {"val": value, "name": name}
            node.replace_all_uses_with(placeholder)
            self.graph.erase_node(node)

    def _take_noise(self) -> None:
        """Replaces random operations with placeholders."""
        self.noise: list[Noise] = []
        needed = _ancestors(self.results)
        for node in [node for node in self.graph.nodes if node.op == "call_function" and is_random(node)]:
            distribution = DISTRIBUTIONS.get(node.target)
            others = node.kwargs.keys() - LAYOUT
            if distribution is None or others or (distribution == "exponential" and len(node.args) > 1):
                raise NotExportable(f"{node.meta['place']} cannot be exported: it samples with {node.target}")
            bounds = tuple(node.args[1:]) if distribution == "integers" else ()
            value = torch.zeros_like(node.meta["val"])
            leaf = ExportedLeaf(f"noise.{len(self.noise)}", value)
            self.noise.append(Noise(leaf, distribution, bounds, node in needed))
            if node in needed:
                with self.graph.inserting_before(node):
                    placeholder = self.graph.placeholder(leaf.name.replace(".", "_"))
                placeholder.meta |= {"val": value, "name": leaf.name}
                node.replace_all_uses_with(placeholder)
            self.graph.erase_node(node)


def _ancestors(nodes: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """Returns the nodes and all nodes on which they depend."""
    found: set[torch.fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node.target in FILLED else node.all_input_nodes
    return found


def _sort_placeholders(graph: torch.fx.Graph, names: list[str]) -> None:
    """Moves placeholders to the front: the given names first, in their order, then all other placeholders."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    order = {name: k for k, name in enumerate(names)}
    placeholders.sort(key=lambda node: order.get(node.meta["name"], len(order)))
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


class _ModuleNames:
    """Names of a policy's modules and tensors; also tracks the running module.

    Attributes:
      names: names of parameters and buffers, by id.
    """

    def __init__(self, policy: Policy):
        self._modules = {"algorithm": policy.algorithm, "transforms": policy.transforms}
        self._running: list[str] = []
        self.names = {
            id(tensor): f"{root}.{name}"
            for root, module in self._modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Tracks calls of modules within the context. After an error, the failed module stays the running module."""
        with contextlib.ExitStack() as stack:
            for root, module in self._modules.items():
                for name, one in module.named_modules(prefix=root):
                    words = f"{name} ({type(one).__name__})"
                    before = one.register_forward_pre_hook(self._enter(words))
                    after = one.register_forward_hook(self._leave)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    def place(self) -> str:
        """Returns the name and class of the innermost module that is running."""
        algorithm = self._modules["algorithm"]
        return self._running[-1] if self._running else f"algorithm ({type(algorithm).__name__})"

    def _enter(self, words: str) -> Callable[..., None]:
        return lambda module, arguments: self._running.append(words)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._running.pop()


class WithoutChecks(TorchFunctionMode):
    """Replaces operations that read tensor values, because such operations cannot be recorded."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        name = getattr(function, "__name__", None)
        if name == "one_hot" and len(arguments) + len(keywords) == 2:
            return _one_hot(*arguments, **keywords)
        if name == "bernoulli" and len(arguments) == 1 and not keywords:
            (probability,) = arguments
            return (torch.rand_like(probability) < probability).to(probability.dtype)
        return function(*arguments, **keywords)


def _one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)
