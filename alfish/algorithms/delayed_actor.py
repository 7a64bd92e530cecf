"""Actors that train less often than their critics."""

from alfish.algorithms.rl_algorithm import RLAlgorithm


class DelayedActor(RLAlgorithm):
    """Counts updates, and tells which ones train the actor: the last of every `actor_period`.

    Subclasses set `actor_period`, return no loss for the actor in the other updates, and call `after_update`.
    """

    actor_period = 1
    _num_updates, shows_all_losses = 0, False  # the latter: the actor has its loss in each call, which trains nothing

    def trains_actor(self) -> bool:
        """Returns True if the next update trains the actor."""
        return self.shows_all_losses or (self._num_updates + 1) % self.actor_period == 0

    def graph_key(self) -> bool:
        return self.trains_actor()

    def after_update(self) -> None:
        self.__dict__["_num_updates"] = self._num_updates + 1  # a module's `__setattr__` takes longer

    def get_extra_state(self) -> dict[str, int]:
        return {"num_updates": self._num_updates}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._num_updates = state["num_updates"]
