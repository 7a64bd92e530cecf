"""Settings that belonged to SAC and DQN in earlier versions and now belong to separate classes.

The saved configuration of a run is rewritten when it is read, so that old runs can be opened and continued. A user's
configuration is refused with a message that names the class.
"""

import re

from alfish.errors import UsageError

# New parameter or class of each moved setting, in the words of the message.
MOVED = {
    "SAC.target_subset": "REDQ.target_subset, of @REDQ in alfish.algorithms.redq",
    "SAC.actor_uses_mean": "the class @REDQ, or @TQC for @Quantiles, in alfish.algorithms.redq",
    "SAC.retrace": "the class @RetraceSAC in alfish.algorithms.retrace",
    "SAC.lower_bound": "SAC.values = @LowerBounded",
    "SAC.joint_pass": "@CrossQ or @XQC in alfish.algorithms.crossq, or @FlashSAC in alfish.algorithms.flashsac",
    "SAC.actor_statistics_always": "the class @XQC in alfish.algorithms.crossq",
    "SAC.noise": "FlashSAC.noise, of @FlashSAC in alfish.algorithms.flashsac",
    "DQN.retrace": "the class @RetraceDQN in alfish.algorithms.retrace",
    "DQN.lower_bound": "DQN.values = @LowerBounded",
    "DQN.entropy_temperature": "SoftDQN.entropy_temperature, of @SoftDQN in alfish.algorithms.munchausen",
    "DQN.munchausen": "MunchausenDQN.munchausen, of @MunchausenDQN in alfish.algorithms.munchausen",
    "DQN.log_policy_floor": "MunchausenDQN.log_policy_floor, of @MunchausenDQN in alfish.algorithms.munchausen",
}
# For each class, its module in alfish.algorithms, and the settings that moved to it, with their defaults.
_TAKEN_OVER = {
    "REDQ": ("redq", {"SAC.target_subset": "None"}),
    "FlashSAC": ("flashsac", {"SAC.noise": "None"}),
    "SoftDQN": ("munchausen", {"DQN.entropy_temperature": "0.03"}),
    "MunchausenDQN": ("munchausen", {"DQN.munchausen": "0.0", "DQN.log_policy_floor": "-1.0"}),
    "CrossQ": ("crossq", {}),
    "XQC": ("crossq", {}),
    "RetraceSAC": ("retrace", {}),
    "RecurrentRetraceSAC": ("retrace", {}),
    "RetraceDQN": ("retrace", {}),
}


def hint(setting: str) -> str:
    """Returns the end of a message, which names the new parameter or class of a setting; '' if it has not moved."""
    return f"; it is now {MOVED[setting]}" if setting in MOVED else ""


def has_moved(text: str) -> bool:
    """Returns whether a run's configuration has settings that have moved."""
    return renewed(text) != text


def renewed(text: str) -> str:
    """Returns a run's configuration, rewritten for the current classes and settings.

    Raises:
      UsageError: the configuration combines options that no current class combines.
    """
    for base in ("SAC", "RecurrentSAC", "DQN"):
        if re.search(rf"@(?:alfish\.algorithms\.)?{base}\b", text):
            text = _renewed(text, base)
    return text


def _renewed(text: str, base: str) -> str:
    prefix = "DQN" if base == "DQN" else "SAC"
    line = re.compile(rf"^(?:{prefix}|{base})\.(\w+) = (.*)\n", re.MULTILINE)
    bound = {f"{prefix}.{name}": value for name, value in line.findall(text)}
    bound = {name: value for name, value in bound.items() if name in MOVED}
    if not bound:
        return text
    text = line.sub(lambda one: "" if f"{prefix}.{one[1]}" in MOVED else one[0], text)
    if bound.get(f"{prefix}.lower_bound") == "True":
        text += f"{prefix}.values = @LowerBounded\n"
    classes = [one for one in (_class_of(bound), _retrace_of(base, bound)) if one]
    if len(classes) > 1 or (base == "RecurrentSAC" and classes not in ([], ["RecurrentRetraceSAC"])):
        raise UsageError(
            f"the configuration combines the options of {' and '.join([base, *classes])}, which no class supports "
            "together any more"
        )
    if not classes:
        return text
    (name,) = classes
    module, settings = _TAKEN_OVER[name]
    if name == "MunchausenDQN":
        settings = {**settings, **_TAKEN_OVER["SoftDQN"][1]}
    for setting, default in settings.items():
        owner = "SoftDQN" if setting == "DQN.entropy_temperature" else name
        text += f"{owner}.{setting.partition('.')[2]} = {bound.get(setting, default)}\n"
    text = re.sub(rf"@(?:alfish\.algorithms\.)?{base}\b", f"@{name}", text)
    return f"import alfish.algorithms.{module}\n{text}"


def _class_of(bound: dict[str, str]) -> str | None:
    if bound.get("SAC.joint_pass") == "'with_actor'":
        return "FlashSAC"
    if bound.get("SAC.joint_pass") == "True":
        return "XQC" if bound.get("SAC.actor_statistics_always") == "True" else "CrossQ"
    if bound.get("SAC.actor_uses_mean") == "True" or bound.get("SAC.target_subset", "None") != "None":
        return "REDQ"
    if float(bound.get("DQN.munchausen", 0)):
        return "MunchausenDQN"
    return "SoftDQN" if bound.get("DQN.entropy_temperature", "None") != "None" else None


def _retrace_of(base: str, bound: dict[str, str]) -> str | None:
    names = {"SAC": "RetraceSAC", "RecurrentSAC": "RecurrentRetraceSAC", "DQN": "RetraceDQN"}
    return names[base] if "True" in (bound.get("SAC.retrace"), bound.get("DQN.retrace")) else None
