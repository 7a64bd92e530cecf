"""Configurations whose runs take seconds, and whose environment can be continued exactly."""

POINT_MASS = """
import alfish.environments.toy
make_environment.env_id = @TensorPointMass
make_environment.num_envs = 8
TensorPointMass.length = 10
Trainer.listeners = [@Evaluate(), @CheckpointSaver()]
MLP.layers = (8,)
Evaluate.period = 500
Evaluate.num_episodes = 8
CheckpointSaver.period = 256
"""
PPO = f"""
include 'ppo.gin'
{POINT_MASS}
Trainer.num_env_steps = 2000
Trainer.unroll_length = 16
EpochBatches.minibatch_size = 64
EpochBatches.num_epochs = 2
"""
SAC = f"""
include 'sac.gin'
{POINT_MASS}
Trainer.num_env_steps = 4000
Trainer.unroll_length = 4
ReplayBatches.capacity = 3000
ReplayBatches.warmup_env_steps = 200
ReplayBatches.updates_per_env_step = 0.25
CriticEnsemble.layers = (8,)
"""
CARTPOLE_IN_TENSORS = """
include 'ppo.gin'
make_environment.env_id = 'alfish/CartPole-v1'
make_environment.num_envs = 8
Trainer.unroller = @CompiledUnroller
CompiledUnroller.compile = False
Trainer.listeners = [@Evaluate(), @CheckpointSaver(), @Summaries()]
Trainer.num_env_steps = 1000
Trainer.unroll_length = 8
Trainer.summary_period = 125
MLP.layers = (8,)
EpochBatches.minibatch_size = 64
EpochBatches.num_epochs = 2
Evaluate.period = 250
Evaluate.num_episodes = 4
CheckpointSaver.period = 64
"""
JOINT_POPULATION = """
include 'dqn.gin'
import alfish.environments.games
import alfish.training.joint_population
make_games.game = 'toy_games:Kept'
make_games.num_games = 4
Trainer.environment = @make_games
Trainer.policies = {'p': ('*', 4)}
Trainer.num_env_steps = 100_000
Trainer.unroll_length = 16
Trainer.listeners = [@CheckpointSaver(), @Summaries(), @JointPopulation()]
Trainer.summary_period = 700
CheckpointSaver.period = 500
JointPopulation.perturb = {'Learner.learning_rate': '1e-6..1e-1'}
JointPopulation.period = 900
Learner.compile = False
MLP.layers = (8,)
ReplayBatches.batch_size = 16
ReplayBatches.capacity = 3000
ReplayBatches.warmup_env_steps = 60
ReplayBatches.updates_per_env_step = 0.1
"""
