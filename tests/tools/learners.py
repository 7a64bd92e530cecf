"""What each of two learners does for `test_replicas.py`, which compares what they return.

python tests/tools/learners.py DIRECTORY       # with the environment variables that torchrun sets
"""

import copy
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from plain_graphs import interpreted
from test_resume import TensorPointMass, make, stop_after, tensors_of
from toys import SlowSecond, Stamped

from alfish import nest
from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.compiler import inductor
from alfish.data import Experience, StepType, trainable
from alfish.environments import make_environment
from alfish.environments.toy import Recall
from alfish.errors import RunError, UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.learner.optimizers import TorchOptimizer
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, DeterministicActor, Torso
from alfish.processes import replicas
from alfish.replay import Prioritized, RingBuffer
from alfish.runs.stop_signals import GRACE_SECONDS, STUCK_SECONDS
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Summaries
from alfish.training.reward_weights import LagrangianWeights
from alfish.transforms import ObservationNormalizer, Transforms
from alfish.transforms.normalizers import RunningMoments
from alfish.unrollers import AsyncUnroller, SyncUnroller
from benchmarks import replicas as benchmark

SMALL = functools.partial(MLP, layers=(8,))
SMALL_DDPG = functools.partial(
    DDPG, actor=functools.partial(DeterministicActor, mlp=SMALL), critic=functools.partial(CriticEnsemble, layers=(8,))
)
REPLAY = functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=16, sampler=Prioritized)


def parameters(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def in_graphs(function):
    """Calls it with graphs that run operation by operation."""
    with interpreted():
        return function()


def chunks(algorithm, seed=0, change=None):
    """Returns this learner's part of random rows, after `change(rows, columns)`."""
    torch.manual_seed(seed)
    columns = torch.arange(benchmark.NUM_COLUMNS).chunk(replicas.size())[replicas.rank()]
    rows = benchmark.random_rows(algorithm, benchmark.CONTINUOUS, torch.float32)
    if change is not None:
        rows = change(rows)
    made = benchmark._epochs if algorithm.on_policy else benchmark._windows
    return made(algorithm, rows, columns)


def new(algorithm, compile=False, **settings):
    torch.manual_seed(0)
    made = algorithm(benchmark.OBSERVATION, benchmark.CONTINUOUS, benchmark.REWARD, **settings)
    return made, Learner(made, compile=compile)


def nonfinite(directory, compile=False):
    def break_last(rows):
        reward = rows.time_step.reward.clone()
        reward[:, -4:] = torch.nan  # of columns of the second learner
        return rows._replace(time_step=rows.time_step._replace(reward=reward))

    algorithm, learner = new(SAC, compile)
    vectors, counts = [], []
    for k in range(3):
        summary = learner.train(chunks(algorithm, k, break_last if k == 1 else None))
        vectors.append(torch.cat([flat for group in learner._plain.groups.values() for flat in group.flat]))
        counts.append(summary["nonfinite_updates"])
    moved = [not torch.equal(a, b) for a, b in zip(vectors, vectors[1:])]
    return {"counts": counts, "moved": moved, "sum": vectors[-1].double().sum().item()}


def kl(directory, compile=False):
    """Numbers of updates where the rows of the second learner were made by a policy that is so far away."""
    found = {}
    for shift in (0.0, 0.18, 1.0):

        def shifted(rows, shift=shift):
            mean = rows.info.policy.mean.clone()
            mean[:, benchmark.NUM_COLUMNS // 2 :] += shift
            return rows._replace(info=rows.info._replace(policy=rows.info.policy._replace(mean=mean)))

        algorithm, learner = new(PPO, compile, target_kl=0.01)
        learner.train(chunks(algorithm, change=shifted))
        with replicas.apart():
            alone, own = new(PPO, target_kl=0.01)
            own.train(chunks(alone, change=shifted))
        found[str(shift)] = [learner.updates, own.updates]
    return found


def rate(directory):
    """Rates of a learner whose rows alone would raise it, and whose mean with the second learner's rows lowers it."""

    def shifted(rows):
        mean = rows.info.policy.mean.clone()
        mean[:, benchmark.NUM_COLUMNS // 2 :] += 1.0
        return rows._replace(info=rows.info._replace(policy=rows.info.policy._replace(mean=mean)))

    found = {}
    for compile in (False, True):
        torch.manual_seed(0)
        algorithm = PPO(benchmark.OBSERVATION, benchmark.CONTINUOUS, benchmark.REWARD)
        with interpreted():
            learner = Learner(algorithm, learning_rate=KLAdaptive(1e-3), compile=compile)
            found[str(compile)] = learner.train(chunks(algorithm, change=shifted))["learning_rate"]
    return found


class Forgetful(PPO):
    """Keeps a mean of rows in a buffer."""

    sums = staticmethod(lambda x: x)

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.register_buffer("average", torch.zeros(()))

    def after_iteration(self, experience):
        self.average += self.sums(experience.time_step.reward.sum())


class Mindful(Forgetful):
    sums = staticmethod(replicas.total)


def forgot(directory):
    errors = []
    for algorithm in (Mindful, Forgetful):
        trainer = make(
            directory / algorithm.__name__, TensorPointMass, {"length": 6}, 8, algorithm=algorithm, summary_period=40
        )
        try:
            trainer.train()
        except RunError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def curious(directory, **options):
    rnd = functools.partial(RND, layers=(8,), output_size=4)
    algorithm = functools.partial(Composed, algorithm=PPO, rewards=[rnd], separate_values=True)
    return make(directory, TensorPointMass, {"length": 6}, 8, algorithm=algorithm, **options)


def parts(directory):
    """Statistics of RND, which divide its rewards, and the weights that are learned with them."""
    trainer = curious(directory, summary_period=40)
    trainer.train()  # each summary checks that networks and statistics are the same in all learners
    part = trainer.algorithm.rewards["rnd"]
    counts = [moments.count.item() for moments in (part.normalizer._moments[0], part.scale._moments)]
    return {"counts": counts, "env_steps": trainer.clock.env_steps, "iterations": trainer.clock.iterations}


class Unequal(gymnasium.Env):
    """Two rewards, which differ between learners. Episodes of the second one are shorter, so it makes fewer steps."""

    def __init__(self):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
        self.reward_space = spaces.Box(-9, 9, (2,), np.float32)
        self._rewards = np.float32([(-1, 2), (3, -4)][replicas.rank()])
        self._length, self._step = (4, 1)[replicas.rank()], 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._step += 1
        return np.zeros(2, np.float32), self._rewards, self._step >= self._length, False, {}


class Noting(LagrangianWeights):
    """Keeps this learner's means, their numbers of steps, and the weights that follow."""

    def start(self, run):
        super().start(run)
        self.noted = []

    def change(self, weights, names, report):
        super().change(weights, names, report)
        means = [report.scalars[f"metrics/average_reward/{name}"] for name in names]
        self.noted.append((means, report.scalars["metrics/average_reward/0/n"], weights.tolist()))


def weights(directory):
    listener = Noting({"0": 0.5, "1": -1.0}, rate=0.2)
    algorithm = functools.partial(PPO, reward_weights=[1.0, 2.0])
    trainer = make(
        directory, Unequal, {}, 8, algorithm=algorithm, listeners=[listener], transforms=[], num_iterations=3,
        summary_period=1,
    )  # fmt: skip
    trainer.train()
    return listener.noted


def sequences(directory):
    """A memory that trains on sequences of a third of the unroll, in two learners and in one with the rows of both."""
    torso = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=5))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    environment = make_environment(Recall, num_envs=4, env_kwargs={"delay": 3})
    transforms = Transforms([], environment.observation_spec, environment.reward_spec)
    torch.manual_seed(0)
    algorithm = PPO(environment.observation_spec, environment.action_spec, environment.reward_spec, network=network)
    unroller = SyncUnroller(environment, algorithm, transforms)
    unroller.stores_states = True
    rows = nest.tensors(unroller.unroll(12)._replace(policy_version=None, transform_state=None))
    environment.close()

    def trained(columns, minibatch_size=None):
        own = copy.deepcopy(algorithm)
        sgd = functools.partial(TorchOptimizer, optimizer="SGD")
        learner = Learner(own, optimizer=sgd, learning_rate=0.1, max_grad_norm=0.5)
        batches = EpochBatches(num_epochs=2, minibatch_size=minibatch_size, sequence_length=4)
        batches.bind(own, transforms, 12, len(columns))
        state = nest.map(lambda leaf: leaf[columns], rows.state)
        batches.add(nest.map(lambda leaf: leaf[:, columns], rows._replace(state=None))._replace(state=state))
        learner.train(batches.chunks(0))
        return parameters(own), learner.updates

    columns = torch.arange(4).chunk(replicas.size())[replicas.rank()]
    together, _ = trained(columns)
    shuffled, updates = trained(columns, 16)
    with replicas.apart():
        alone, _ = trained(torch.arange(4))
    return {
        "from_one_learner": (together - alone).abs().max().item(),
        "moved": (together - parameters(algorithm)).abs().max().item(),
        "updates": updates,
        "sums": [each.double().sum().item() for each in (together, shuffled)],
    }


def off_policy(directory, batches=REPLAY, **options):
    return make(
        directory, TensorPointMass, {"length": 6}, 2, algorithm=SMALL_DDPG, batches=batches, num_iterations=16,
        transforms=[ObservationNormalizer], **options,
    )  # fmt: skip


def on_policy(directory, **options):
    return make(directory, TensorPointMass, {"length": 6}, 8, **options)


def same(one, other):
    return [
        path
        for path, a, b in zip(nest.paths(one), nest.leaves(one), nest.leaves(other), strict=True)
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]


def resume(directory):
    found = {}
    for run, stop in ((on_policy, 3), (curious, 3), (off_policy, 9)):
        whole, cut = directory / f"{run.__name__} whole", directory / f"{run.__name__} cut"
        uninterrupted = run(whole)
        uninterrupted.train()
        first = run(cut)
        stop_after(first, stop)
        again = run(cut)
        report = again.train()
        found[run.__name__] = {
            "differs": same(tensors_of(uninterrupted), tensors_of(again)),
            "iterations": report.iterations,
            "env_steps": report.env_steps,
            "columns": again.unroller.num_columns,
            "sum": parameters(again.algorithm).double().sum().item(),
            "rows": str(again.unroller.time_step.observation.tolist()),
        }
    return found


class Kill(CheckpointSaver):
    """Sends SIGTERM to the second learner."""

    def after_iteration(self, run, report):
        if report.iterations == 3 and replicas.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        super().after_iteration(run, report)


def sigterm(directory):
    trainer = on_policy(directory, listeners=[Kill(0)])
    report = trainer.train()
    return {
        "iterations": report.iterations,
        "finished": report.finished,
        "signal": trainer.interrupted_by,
        "saved": trainer.directory.checkpoints.steps(),
        "env_steps": report.env_steps,
    }


class Hanging(Stamped):
    """Hangs in the second learner, which receives SIGTERM meanwhile."""

    def step(self, action):
        if replicas.rank() == 1 and self._episode == 4:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            while True:
                time.sleep(0.05)
        return super().step(action)


def hang(directory):
    trainer = make(directory, Hanging, {}, 4, num_iterations=1000, transforms=[], listeners=[CheckpointSaver(0)])
    report = trainer.train()
    return {"iterations": report.iterations, "signal": trainer.interrupted_by, "env_steps": report.env_steps}


class Late(Hanging):
    """Hangs in the second learner, as in its base class, and takes long in the first one."""

    slept = False

    def step(self, action):
        if replicas.rank() == 0 and self._episode == 4 and not Late.slept:
            Late.slept = True
            time.sleep(GRACE_SECONDS + STUCK_SECONDS + 2.5)
        return super().step(action)


def late(directory):
    """The second learner waits for the first one, longer than a main thread may that runs no Python."""
    trainer = make(directory, Late, {}, 4, num_iterations=1000, transforms=[], listeners=[CheckpointSaver(0)])
    report = trainer.train()
    return {"iterations": report.iterations, "saved": trainer.directory.checkpoints.steps()}


class Solved(Listener):
    def after_iteration(self, run, report):
        if report.iterations == 3:
            run.stop("solved")


def stop(directory):
    trainer = on_policy(directory, listeners=[Solved(), CheckpointSaver(0), Summaries()])
    report = trainer.train()
    return {"iterations": report.iterations, "reason": trainer.clock.stop_reason, "updates": report.updates}


def seconds(directory):
    trainer = on_policy(directory, num_iterations=None, wall_seconds=0.5)
    report = trainer.train()
    return {"iterations": report.iterations, "seconds": report.wall_seconds}


def moments(directory):
    generator = torch.Generator().manual_seed(0)
    rows, mask = torch.randn(20, 3, generator=generator), torch.rand(20, generator=generator) < 0.5
    part = slice(0, 8) if replicas.rank() == 0 else slice(8, 20)
    together, alone = RunningMoments((3,)), RunningMoments((3,))
    for _ in range(2):
        together.update(rows[part], mask[part], 1e-8)
        with replicas.apart():
            alone.update(rows, mask, 1e-8)
    pairs = zip(together.buffers(), alone.buffers(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def plain(directory):
    """Trains each algorithm with plain updates, saves its parameters, and returns what was trained."""
    directory.mkdir(exist_ok=True)
    columns = torch.arange(benchmark.NUM_COLUMNS).chunk(replicas.size())[replicas.rank()]
    cases = [benchmark.Case(name, num_updates=20) for name in benchmark.ALGORITHMS]
    torch.save([benchmark.trained(case, columns) for case in cases], directory / f"{replicas.rank()}.pt")
    return cases


FEW = ("ppo", "sac")  # both kinds of batches, and several losses; tracing a memory's graph takes longest


def graphs(directory, algorithms=FEW):
    """Differences of interpreted graphs of both from those of one learner, for each of the algorithms."""
    columns = torch.arange(benchmark.NUM_COLUMNS)
    own = columns.chunk(replicas.size())[replicas.rank()]
    found = {}
    for name in algorithms:
        case = benchmark.Case(name, is_compiled=True, num_updates=6)
        together = in_graphs(lambda case=case: benchmark.trained(case, own))
        with replicas.apart():
            alone = in_graphs(lambda case=case: benchmark.trained(case, columns))
        found[name] = [(together - alone).abs().max().item(), together.sum().item()]
    return found


def failing_graph(directory):
    """Whether updates stay plain in both learners where the second one cannot compile."""
    if replicas.rank() == 1:
        inductor._compile, before = _refuse, inductor._compile
    algorithm, learner = new(SAC, compile=True)
    try:
        in_graphs(lambda: learner.train(chunks(algorithm))) if replicas.rank() == 0 else learner.train(
            chunks(algorithm)
        )
    finally:
        if replicas.rank() == 1:
            inductor._compile = before
    return {"is_plain": learner.is_plain, "updates": learner.updates, "sum": parameters(algorithm).sum().item()}


def _refuse(*_):
    raise inductor.NotCompilable("no compiler here")


def priorities(directory):
    ring, sampler = RingBuffer(200, 2), Prioritized(beta=1.0)
    sampler.bind(ring, 2)
    torch.manual_seed(replicas.rank())
    algorithm, _ = new(DDPG)
    rows = benchmark.random_rows(algorithm, benchmark.CONTINUOUS, torch.float32)
    for _ in range(10):
        ring.push(nest.map(lambda leaf: leaf[:, :2], rows))
    window = sampler.draw(32, 0.0)
    sampler.update(window, torch.rand(32) + 5 * replicas.rank())
    return [sampler.draw(32, 0.0, 4).weight.view(4, 8).max(1).values.tolist(), float(sampler._largest)]


class Slow(TensorPointMass):
    """Has no clock: the second learner is in its fourth step when the first finishes its unroll of eight."""

    def __init__(self, num_envs, length):
        super().__init__(num_envs, length)
        self._num_calls, self.own_steps = 0, 0

    def step(self, action):
        self.own_steps += int((self._elapsed < self._length).sum())
        self._num_calls += 1
        group = replicas._group
        finished, slow = (f"alfish/{name}-{group.num_counters - 1}" for name in ("counter", "slow"))
        if replicas.rank() == 1 and self._num_calls % 4 == 0:
            unrolls = group.store.add(slow, 1)
            wait_until(lambda: group.store.add(finished, 0) == 2 * unrolls - 1)
        if replicas.rank() == 0 and self._num_calls % 8 == 0:
            wait_until(lambda: group.store.add(slow, 0) == self._num_calls // 8)
        return super().step(action)


def wait_until(is_true):
    while not is_true():
        time.sleep(0.001)


def stragglers(directory):
    def made(name, num_epochs=2, **options):
        unroller = functools.partial(SyncUnroller, sync_fraction=0.5)
        batches = functools.partial(EpochBatches, num_epochs=num_epochs)
        made = make(
            directory / name, Slow, {"length": 6}, 8, unroller=unroller, num_iterations=6, batches=batches, **options
        )
        lengths, shapes, unroll = [], [], made.unroller.unroll

        def noted(*arguments):
            experience = unroll(*arguments)
            lengths.append(int((experience.time_step.step_type[:, 0] != StepType.PAD).sum()) - 1)
            shapes.append(list(experience.action.shape[:2]))
            return experience

        made.unroller.unroll = noted
        return made, lengths, shapes

    whole, lengths, shapes = made("whole")
    report = whole.train()
    cut, before, _ = made("cut")
    stop_after(cut, 3)
    again, after, _ = made("cut")
    again.train()
    return {
        "lengths": lengths,
        "lengths_resumed": after,
        "shapes": shapes,
        "sum": parameters(whole.algorithm).double().sum().item(),
        "env_steps": report.env_steps,
        "own_steps": whole.environment.env.own_steps,
        "differs": same(tensors_of(whole), tensors_of(again)),
        **of_one_iteration(directory, made),
    }


def of_one_iteration(directory, made):
    """Largest differences of parameters: from those of one learner, computed by hand, and from the initial ones."""
    sgd = functools.partial(TorchOptimizer, optimizer="SGD")
    learner = functools.partial(Learner, optimizer=sgd, learning_rate=0.1, max_grad_norm=None)
    trainer, _, _ = made("one", transforms=[], learner=learner, num_epochs=1)
    initial, taken, unroll = copy.deepcopy(trainer.algorithm), [], trainer.unroller.unroll
    trainer.unroller.unroll = lambda *arguments: taken.append(unroll(*arguments)) or taken[-1]
    stop_after(trainer, 1)
    torch.save(tuple(taken[0]), directory / f"{replicas.rank()}.pt")
    replicas.gather(0)  # both have written
    rows = [Experience(*torch.load(directory / f"{k}.pt", weights_only=False)) for k in range(2)]
    before = parameters(initial).clone()
    with replicas.apart():
        step_by_hand(initial, [nest.map(lambda leaf, n=n: leaf[:n], each) for each, n in zip(rows, (9, 5))])
    trained = parameters(trainer.algorithm)
    return {
        "from_one_learner": (trained - parameters(initial)).abs().max().item(),
        "moved": (trained - before).abs().max().item(),
    }


def step_by_hand(algorithm, parts):
    """Makes one step of gradient descent on the mean loss over the rows of all parts, which have no PAD rows."""
    algorithm._normalize_advantage, losses, masks, infos = False, [], [], []
    for rows in parts:
        with torch.no_grad():
            infos.append(algorithm.preprocess_experience(rows).info)
        masks.append(trainable(rows.time_step.step_type))
    advantages = torch.cat([info.advantage[mask] for info, mask in zip(infos, masks)])
    for rows, info, mask in zip(parts, infos, masks):
        info = info._replace(advantage=(info.advantage - advantages.mean()) / advantages.std(correction=0))
        rows, info = nest.map(lambda leaf, like=mask: leaf[: len(like)], (rows._replace(info=None), info))
        made = algorithm.train_step(rows, None)
        losses.append(algorithm.calc_loss(rows._replace(info=info), made.info).loss[mask])
    torch.cat(losses).mean().backward()
    with torch.no_grad():
        for parameter in algorithm.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def mistakes(directory):
    """Types and words of the errors that end the learners of a run."""
    found = {}
    for name, errors in (("both", ("no such file", "no such file")), ("own", ("no disk", "no GPU"))):
        error = replicas._group.reported(UsageError(errors[replicas.rank()]))
        found[name] = [type(error).__name__, str(error)]
        replicas.gather(0)
        if replicas.rank() == 0:  # the store is used again
            replicas._group.store.delete_key("alfish/mistake")
            replicas._group.store.delete_key("alfish/told-1")
        replicas.gather(0)
    return found


def workers(directory):
    unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep", unroll_length=8)
    trainer = off_policy(directory, functools.partial(REPLAY, updates_per_env_step=0.125), unroller=unroller)
    report = trainer.train()
    return {
        "env_steps": report.env_steps,
        "columns": trainer.unroller.num_columns,
        "updates": report.updates,
        "sum": parameters(trainer.algorithm).double().sum().item(),
    }


def readiness(directory):
    """Numbers of updates while the replay of the second learner has no window yet, and of runs with free workers."""
    algorithm, _ = new(DDPG)
    batches = ReplayBatches(
        capacity=400, batch_size=8, window_length=8, warmup_env_steps=0, updates_per_env_step=0.25, clear_after_use=True
    )
    batches.bind(algorithm, Transforms([], benchmark.OBSERVATION, benchmark.REWARD), 8, 2)
    trained = []
    for clock, own in ((40, (20, 3)), (60, (8, 3)), (80, (8, 8)), (120, (3, 20)), (160, (20, 20))):
        rows = benchmark.random_rows(algorithm, benchmark.CONTINUOUS, torch.float32)
        row = nest.map(lambda leaf: leaf[:1, :2], rows._replace(state=None))
        row.time_step.step_type.fill_(StepType.MID)
        num_rows = own[replicas.rank()]
        batches.add(nest.map(lambda leaf, n=num_rows: leaf.repeat(n, *[1] * (leaf.ndim - 1)), row))
        trained.append(sum(len(made.minibatches()) for made in batches.chunks(clock)))
    unroller = functools.partial(AsyncUnroller, num_workers=2, mode="free", unroll_length=8)
    replay = functools.partial(REPLAY, window_length=6)
    trainer = make(
        directory, SlowSecond, {}, 1, algorithm=DQN, transforms=[], unroller=unroller,
        batches=replay, num_iterations=None, num_env_steps=300,
    )  # fmt: skip
    report = trainer.train()
    return {
        "trained": trained,
        "run": [report.env_steps, report.updates, parameters(trainer.algorithm).double().sum().item()],
    }


def environments(directory):
    trainer = make(directory, Stamped, {}, 4, transforms=[])
    trainer.unroller.start()
    noise = torch.rand(2).tolist()
    stamps = trainer.unroller.time_step.observation[:, 0].tolist()
    trainer.close()
    with_evaluation = trainer.evaluator(4, num_envs=4)
    number = with_evaluation.environment.num_envs
    with_evaluation.close()
    numpy = np.random.rand()
    return {"stamps": stamps, "noise": noise, "numpy": numpy, "evaluated": number}


SCENARIOS = {
    "nonfinite": nonfinite,
    "nonfinite in graphs": lambda directory: in_graphs(lambda: nonfinite(directory, True)),
    "kl": kl,
    "kl in graphs": lambda directory: in_graphs(lambda: kl(directory, True)),
    "rate": rate,
    "forgot": forgot,
    "parts": parts,
    "weights": weights,
    "sequences": sequences,
    "resume": resume,
    "sigterm": sigterm,
    "hang": hang,
    "late": late,
    "stop": stop,
    "seconds": seconds,
    "moments": moments,
    "plain": plain,
    "graphs": graphs,
    "other graphs": functools.partial(graphs, algorithms=[name for name in benchmark.ALGORITHMS if name not in FEW]),
    "failing graph": failing_graph,
    "priorities": priorities,
    "stragglers": stragglers,
    "mistakes": mistakes,
    "workers": workers,
    "readiness": readiness,
    "environments": environments,
}


def main(directory, names):
    found = {}
    with replicas.joined():
        for name in names or SCENARIOS:
            began = time.perf_counter()
            try:
                found[name] = SCENARIOS[name](directory / name)
            except BaseException:
                print(f"{name}, learner {replicas.rank()}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            if replicas.rank() == 0 and os.environ.get("TIMES"):
                print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
