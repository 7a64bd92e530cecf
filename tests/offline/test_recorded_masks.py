"""Action masks in recorded data: kept with the space, checked against actions, and added where data have none."""

import functools
import json

import gin
import numpy as np
import pytest
from gymnasium import spaces

from alfish.algorithms.bc import BC
from alfish.algorithms.iql import IQL
from alfish.environments import make_environment
from alfish.environments.toy import MaskedIdentity
from alfish.errors import UsageError
from alfish.learner.batches import OfflineBatches
from alfish.learner.learner import Learner
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces, Validator
from alfish.offline.recorded_spaces import check_fit, from_json, to_json
from alfish.specs import ActionMask
from alfish.training.trainer import Trainer

X = spaces.Box(-1, 1, (2,), np.float32)
MASKED = Spaces(spaces.Dict(observation=X, action_mask=ActionMask(3)), spaces.Discrete(3, start=4))
INSIDE = Spaces(spaces.Dict(x=X, game=spaces.Dict(legal=ActionMask(3))), spaces.Discrete(3, start=4))
LENGTH = 5


def episodes(count=4, form="masked", forbidden=()):
    """Every action is 4, 5 or 6; `forbidden` episodes have one, in the last step, that its mask forbids."""
    generator, made = np.random.default_rng(0), []
    for k in range(count):
        x = generator.uniform(-1, 1, (LENGTH + 1, 2)).astype(np.float32)
        actions = generator.integers(3, size=LENGTH)
        mask = np.zeros((LENGTH + 1, 3), np.int8)
        mask[np.arange(LENGTH), actions] = 1
        if k in forbidden:
            mask[LENGTH - 1] = 1 - mask[LENGTH - 1]
        observations = {
            "masked": {"observation": x, "action_mask": mask},
            "inside": {"x": x, "game": {"legal": mask}},
            "bare": x,
            "dict": {"observation": x},
            "dict inside": {"x": x, "game": {}},
        }[form]
        flags = np.zeros(LENGTH, bool)
        made.append(Episode(str(k), observations, actions + 4, np.ones(LENGTH, np.float32), flags, flags))
    return made


def test_the_space_of_a_mask_is_stored_as_one():
    again = from_json(json.loads(json.dumps(to_json(MASKED.observation))))
    assert isinstance(again["action_mask"], ActionMask) and again == MASKED.observation


@pytest.mark.parametrize(("form", "of"), [("masked", MASKED), ("inside", INSIDE)])
@pytest.mark.parametrize("policy", ["raise", "drop_episode", "warn"])
def test_a_recorded_action_that_its_mask_forbids_is_an_error_with_its_episodes(form, of, policy):
    validator = Validator(of, policy)
    kept = [one.id for item in episodes(40, form, forbidden=(1, 3)) for one in validator.check(item)]
    assert kept == [str(k) for k in range(40) if k not in (1, 3)]
    name = {"masked": "observation.action_mask", "inside": "observation.game.legal"}[form]
    found = validator.report.found("error")
    assert found == {f"an action is forbidden by its mask, {name}": ["1", "3"]}
    if policy == "raise":
        with pytest.raises(
            UsageError, match=rf"2 of 40 episodes .* forbidden by its mask, {name} \(2 episodes: 1, 3\)"
        ):
            validator.finish()


def test_an_episode_without_steps_is_left_out_of_data_with_masks():
    whole = episodes(1)[0]
    observations = {name: leaf[:1] for name, leaf in whole.observations.items()}
    empty = Episode("empty", observations, *(part[:0] for part in whole[2:]))
    validator = Validator(MASKED)
    assert [one.id for item in (empty, whole) for one in validator.check(item)] == ["0"]
    assert validator.report.found("mended")["it is empty and left out"] == ["empty"]


@pytest.mark.parametrize(
    ("form", "of"),
    [("bare", MASKED), ("dict", MASKED), ("dict inside", INSIDE), ("masked", MASKED), ("inside", INSIDE)],
)
def test_data_without_masks_allow_all_actions_with_one_warning(form, of):
    validator = Validator(of)
    kept = [one for item in episodes(form=form) for one in validator.check(item)]
    validator.finish()
    notes = [note for note in validator.report.found("warning") if "every action counts as allowed" in note]
    assert len(notes) == ("masked" not in form and form != "inside")
    for episode in kept:
        observation = episode.observations
        mask = observation["game"]["legal"] if of is INSIDE else observation["action_mask"]
        assert mask.shape == (LENGTH + 1, 3) and mask.dtype == np.int8
        assert mask.all() == (form not in ("masked", "inside"))
        assert (observation["x"] if of is INSIDE else observation["observation"]).shape == (LENGTH + 1, 2)


def test_spaces_fit_without_the_mask_but_not_with_other_changes():
    for form in (
        X,
        spaces.Dict(observation=X),
        MASKED.observation,
        spaces.Dict(observation=X, action_mask=spaces.MultiBinary(3)),
    ):
        check_fit(Spaces(form, MASKED.action), MASKED, "data")
    check_fit(Spaces(spaces.Dict(x=X, game=spaces.Dict()), INSIDE.action), INSIDE, "data")
    for form in (
        spaces.Discrete(3),
        spaces.Dict(other=X),
        spaces.Dict(observation=X, action_mask=spaces.MultiBinary(4)),
    ):
        with pytest.raises(UsageError, match="the observations of data are"):
            check_fit(Spaces(form, MASKED.action), MASKED, "data")


def recorded(with_masks, count=30):
    """Episodes of MaskedIdentity with the right action, which the masks always allow."""
    environment = MaskedIdentity(6, 4, length=10)
    made = []
    for k in range(count):
        target, info = environment.reset(seed=k)
        observations, masks, actions = [target], [info["action_mask"]], []
        for _ in range(10):
            actions.append(target)
            target, _, _, _, info = environment.step(target)
            observations.append(target)
            masks.append(info["action_mask"])
        observation = np.array(observations)
        nested = {"observation": observation, "action_mask": np.array(masks)}
        flags = np.zeros(10, bool)
        made.append(
            Episode(
                str(k), nested if with_masks else observation, np.array(actions), np.ones(10, np.float32), flags, flags
            )
        )
    of = Spaces(environment.observation_space, environment.action_space)
    if with_masks:
        of = of._replace(observation=spaces.Dict(observation=of.observation, action_mask=spaces.MultiBinary(6)))
    return Arrays(made, of, "recorded")


@pytest.mark.parametrize(("algorithm", "with_masks"), [(BC, True), (IQL, False)])
def test_offline_training_takes_masks_from_the_data_or_adds_them(tmp_path, algorithm, with_masks):
    gin.parse_config("MLP.layers = (32,)\nCriticEnsemble.layers = (32,)")
    source = recorded(with_masks)
    make = functools.partial(
        make_environment, functools.partial(MaskedIdentity, 6, 4, length=10), action_mask="info:action_mask"
    )
    trainer = Trainer(
        tmp_path,
        algorithm=algorithm,
        environment=make,
        batches=functools.partial(OfflineBatches, functools.partial(OfflineBuffer, [source]), batch_size=32),
        listeners=[],
        learner=functools.partial(Learner, learning_rate=1e-2, compile=False),
        num_updates=60,
        device="cpu",
    )
    trainer.train()
    evaluator = trainer.evaluator(10, 2, None)
    returns = evaluator.evaluate(10).mean
    evaluator.close()
    trainer.close()
    assert returns > 9  # the right action each time; a forbidden one would have been refused
