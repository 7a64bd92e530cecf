"""What follows a generation: first values, perturbed values, and who is replaced by whom."""

import numpy as np

from alfish.training.generations import Member, MemberResult, Perturbed, first_generation, next_generation


def test_first_values_are_spread_over_the_range_and_depend_only_on_the_seed():
    perturbed = [Perturbed.parse("a.x=1e-5..1e-1"), Perturbed.parse("a.n=1..4"), Perturbed.parse("a.z=0..2")]
    members = first_generation(400, perturbed, seed=0)
    assert members == first_generation(400, perturbed, seed=0) != first_generation(400, perturbed, seed=1)
    x, n, z = (np.array([float(member.bindings[name]) for member in members]) for name in ("a.x", "a.n", "a.z"))
    assert abs(np.median(np.log10(x)) - -3) < 0.3 and x.min() < 3e-5 and x.max() > 3e-2
    assert set(n) == {1, 2, 3, 4} and all("." not in member.bindings["a.n"] for member in members)
    assert abs(np.median(z) - 1) < 0.2 and z.max() <= 2
    assert all(float(f"{float(member.bindings['a.x']):.6g}") == float(member.bindings["a.x"]) for member in members)


def test_perturbed_values_stay_in_bounds_and_integers_change():
    generator = np.random.default_rng(0)
    real, whole = Perturbed.parse("a.x=0.5..10"), Perturbed.parse("a.n=1..64")
    assert {real.perturb("4.0", generator) for _ in range(50)} == {"3.2", "5.0"}
    assert {real.perturb("9.0", generator) for _ in range(50)} == {"7.2", "10.0"}
    assert {real.perturb("0.5", generator) for _ in range(50)} == {"0.5", "0.625"}
    assert {whole.perturb("2", generator) for _ in range(50)} == {"1", "3"}
    assert {whole.perturb("40", generator) for _ in range(50)} == {"32", "50"}
    assert {whole.perturb("64", generator) for _ in range(50)} == {"51", "64"}


def result(number, value, x="1.0", variance=0.0, generation=4):
    return MemberResult(Member(generation, number, None, {"a.x": x}), value, variance)


def follow(results, num_replaced=2, gap=0.0, seed=0):
    return next_generation(results, [Perturbed.parse("a.x=0.001..1000")], seed, num_replaced, gap)


def test_the_worst_members_continue_from_the_best_with_perturbed_settings():
    values = [5, 1, 7, 3, 2, 8, 4, 6]
    results = [result(number, value, str(10.0 * number + 1)) for number, value in enumerate(values)]
    drawn = set()
    for seed in range(40):
        members = follow(results, seed=seed)
        assert members == follow(results, seed=seed)
        assert [(member.generation, member.number) for member in members] == [(5, number) for number in range(8)]
        for member in members:
            if member.number in (1, 4):
                assert member.parent in ("g004/m2", "g004/m5")
                before = results[int(member.parent[-1])].member.bindings["a.x"]
                drawn.add((member.number, member.parent, round(float(member.bindings["a.x"]) / float(before), 2)))
            else:
                assert member.parent == f"g004/m{member.number}"
                assert member.bindings == results[member.number].member.bindings
    assert drawn == {(number, f"g004/m{best}", f) for number in (1, 4) for best in (2, 5) for f in (0.8, 1.25)}


def test_no_two_members_are_the_same():
    """Two copies of one member would else have the same settings half of the time, and the same bits."""
    for seed in range(40):
        results = [result(0, 9, "1000.0"), result(1, 1), result(2, 8, "1000.0"), result(3, 2)]
        members = follow(results, seed=seed)
        assert len({(member.parent, member.bindings["a.x"]) for member in members}) == 4


def test_a_gap_is_counted_in_standard_errors():
    for variance, gap, is_replaced in [(0.5, 0.9, True), (0.5, 1.1, False), (0.0, 1.1, True), (np.inf, 1e-9, False)]:
        members = follow([result(0, 3.0, variance=variance), result(1, 2.0, variance=variance)], 1, gap)
        assert (members[1].parent == "g004/m0") == is_replaced
    equal = follow([result(0, 2.0), result(1, 2.0)], 1)
    assert [member.parent for member in equal] == ["g004/m0", "g004/m1"]


def test_a_failed_member_is_replaced_whatever_the_gap_and_ends_without_replacement():
    lost = -np.inf
    results = [result(0, 1.0, variance=9.0), result(1, lost), result(2, 2.0, variance=9.0), result(3, lost)]
    assert [member.parent for member in follow(results, 1, gap=3.0)] == [
        "g004/m0",
        "g004/m2",
        "g004/m2",
        "g004/m2",
    ]
    assert [member.number for member in follow(results, 0)] == [0, 2]
    assert all(member.parent != "g004/m1" for member in follow(results, 2))


def test_kept_members_are_never_replaced():
    results = [result(0, 1.0), result(1, 9.0), result(2, 2.0), result(3, 3.0)]
    settings = [Perturbed.parse("a.x=0.001..1000")]
    for seed in range(10):
        members = next_generation(results, settings, seed, 1, 0.0, kept=[0])
        assert [member.parent for member in members] == ["g004/m0", "g004/m1", "g004/m1", "g004/m3"]
        assert members[0].bindings == {"a.x": "1.0"} != members[2].bindings
    many = next_generation(results, settings, 0, 2, 0.0, kept=[0])
    assert [member.parent for member in many][:2] == ["g004/m0", "g004/m1"]
    assert many[3].parent == "g004/m3"  # one of the best is not replaced, whatever number is


def test_the_members_in_the_middle_have_their_own_settings_perturbed():
    results = [result(number, float(number)) for number in range(4)]
    settings = [Perturbed.parse("a.x=0.001..1000")]
    members = next_generation(results, settings, 0, 1, 0.0, perturbs_others=True)
    assert [member.parent for member in members][1:] == ["g004/m1", "g004/m2", "g004/m3"]
    assert {member.bindings["a.x"] for member in members[1:3]} <= {"0.8", "1.25"}
    assert members[3].bindings == {"a.x": "1.0"}


def test_mutation_rate_is_the_probability_of_a_changed_value():
    perturbed = [Perturbed.parse(f"a.x{k}=0.001..1000") for k in range(20)]
    bindings = {one.name: "1.0" for one in perturbed}
    results = [MemberResult(Member(0, number, None, bindings), float(number), 0.0) for number in range(2)]
    changed = [
        sum(text != "1.0" for text in next_generation(results, perturbed, seed, 1, 0.0, 0.25)[0].bindings.values())
        for seed in range(100)
    ]
    assert abs(np.mean(changed) - 5) < 0.6 and min(changed) > 0
