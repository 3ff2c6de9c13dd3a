from killed import unlike
from kills import score


def test_the_tally_counts_kills_and_what_differs():
    story = {
        "command": "train",
        "seed": 0,
        "stops": [{"signal": "SIGTERM", "status": 143}, {"signal": "SIGKILL", "status": None}],
        "status": 0,
        "compared": 7,
        "differs": ["checkpoint/step"],
        "litter": [],
    }
    assert score([story, {**story, "differs": []}]).splitlines()[2] == "| train | 4 | 2 | 2 | 7 | 1 | 2 |"


def test_values_differ_that_are_others_or_in_one_run_alone():
    assert unlike({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "3", "d": "3"}) == ["b", "c", "d"]
