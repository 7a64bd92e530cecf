"""The timer of a run's parts."""

from alfish.runs.timer import Timer


def test_nothing_is_counted_before_the_start():
    timer = Timer()
    double = timer.around("double", lambda x: 2 * x)
    assert [double(3), double(4)] == [6, 8] and list(timer.each("items", [1])) == [1]
    timer.begin("part")
    assert not timer.seconds and not timer.calls


def test_it_counts_parts_within_parts_once():
    timer = Timer()
    double = timer.around("inner", lambda x: 2 * x)
    timer.start()
    timer.begin("outer")
    assert double(3) == 6
    timer.begin("outer")
    assert timer.calls == {"outer": 2, "inner": 1} and set(timer.seconds) >= {"outer", "inner"}
    assert all(seconds >= 0 for seconds in timer.seconds.values())
