"""Parameters that are bound anew: whole values, and entries of lists and dicts."""

import gin
import pytest

import alfish.learner.learner  # noqa: F401, whose parameters gin then knows
from alfish.errors import UsageError
from alfish.parameters.rebinding import Setting, rebound, whole_binding

RATE = "Learner.learning_rate"


def test_a_setting_has_the_value_of_the_nearest_scope():
    gin.parse_config(f"{RATE} = 1e-3\np1/{RATE} = {{'all': 1e-4}}\na/{RATE} = [1.0, 2.0]")
    here, there = Setting.parse(RATE, "p0"), Setting.parse(f"{RATE}['all']", "p1")
    assert (here.configured(), here.bound()) == (1e-3, None) and (there.configured(), there.bound()) == (1e-4, 1e-4)
    assert there.replaced(0.5) == {"all": 0.5} and Setting.parse(f"{RATE}[all]", "p1").key == "all"
    assert Setting.parse(f"a/{RATE}[1]", "p1").replaced(3.0) == [1.0, 3.0]
    assert Setting.parse("Learner.max_nonfinite_updates", "p1").configured() == 10
    with pytest.raises(UsageError, match=r"learning_rate\[2\] has no such entry: the value is \[1.0, 2.0\]"):
        Setting.parse(f"a/{RATE}[2]", "p1").replaced(3.0)


def test_bindings_hold_within_the_context_only():
    gin.parse_config(f"p0/{RATE} = [1.0, 2.0, 3.0]")
    before = gin.config_str()
    read = gin.configurable("reads_nothing", module="test")(lambda rate=0.0: rate)
    with rebound({f"{RATE}[0]": "5", f"{RATE}[2]": "0.5"}, "p0", complete=False):
        assert gin.query_parameter(f"p0/{RATE}") == [5, 2.0, 0.5]
    with pytest.raises(UsageError, match="no part of p0 reads Learner.learning_rate"), rebound({RATE: "0.5"}, "p0"):
        read()
    with pytest.raises(ZeroDivisionError), rebound({RATE: "0.5"}, "p0"):
        _ = 1 / 0
    with rebound({"NoSuch.rate": "0.5"}, "p0", complete=False):
        pass
    assert gin.config_str() == before


def test_a_binding_of_an_entry_is_written_to_the_whole_value():
    gin.parse_config(f"{RATE} = {{'all': 1e-3, 'critic': 2e-3}}")
    assert whole_binding(f"{RATE}['critic'] = 5e-4") == f"{RATE} = {{'all': 0.001, 'critic': 0.0005}}"
    for binding in ("PPO.gamma = 0.5", "import wave", "a.b = {'x[0]': 1}", f"{RATE}['critic'] = @Linear()"):
        assert whole_binding(binding) == binding
