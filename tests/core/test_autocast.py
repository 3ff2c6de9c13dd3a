import threading

import torch

from loka.core.device import no_autocast


def test_threads_get_their_own_autocast_back():
    """One call of a decorated function lies inside of another thread's: each ends as its caller was."""
    inside, done, found = threading.Event(), threading.Event(), {}

    @no_autocast()
    def work(first):
        found["during", first] = torch.is_autocast_enabled("cpu")
        (inside.set if first else done.set)()
        assert (done if first else inside).wait(30)

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            work(True)
            found["first"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def without():
        assert inside.wait(30)
        work(False)
        found["second"] = torch.is_autocast_enabled("cpu")

    threads = [threading.Thread(target=each) for each in (under_autocast, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {
        ("during", True): False,
        ("during", False): False,
        "first": (True, torch.bfloat16),
        "second": False,
    }
