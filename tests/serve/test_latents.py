import pytest
import torch

from loka.core.exceptions import FileRefused, ServeRefused
from loka.serve import Latents

WIDTH = 24


def values(count, seed=0):
    """Rows of widely different sizes, and in each row values down to nothing."""
    drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.logspace(-20, 20, count).unsqueeze(1) * torch.logspace(-6, 0, WIDTH)


def latents(ids, teacher="T", version=1, written=10):
    made = torch.tensor(ids, dtype=torch.int64), values(len(ids), version)
    return Latents.of(*made, teacher=teacher, version=version, written=written)


def test_a_latent_comes_back_within_half_a_step_of_e4m3():
    """Half a step is 2^-4 of the value, or 2^-10 of the scale, of 3 mantissa bits; 1e-6 is float32's."""
    told = values(40)
    told[20] = 0
    store = Latents.of(torch.arange(40), told, teacher="T", version=1, written=0)
    assert store.bytes == 40 * (WIDTH + 4 + 3 * 8)
    found = store.look_up(torch.arange(40), now=0).values
    scale = told.abs().amax(dim=1, keepdim=True) / 448
    bound = torch.maximum(told.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6)
    assert ((found - told).abs() <= bound).all()
    assert not torch.equal(found, told)


def test_a_look_up_counts_hits_ages_and_versions(tmp_path):
    store = latents([7, 3, 9]).merged(latents([3, 5], version=2, written=25))
    store.save(tmp_path)
    for one in (store, Latents.load(tmp_path, teacher="T")):
        assert one.ids.tolist() == [3, 5, 7, 9]
        found = one.look_up(torch.tensor([9, 4, 3, 3, 100, -1, 7, 5]), now=30)
        assert found.hit.tolist() == [True, False, True, True, False, False, True, True]
        assert found.hit_rate == 5 / 8
        assert found.age.tolist() == [20, -1, 5, 5, -1, -1, 20, 5]
        assert found.version.tolist() == [1, -1, 2, 2, -1, -1, 1, 2]
        assert not found.values[~found.hit].any()
        fresh = latents([3, 5], version=2).look_up(torch.tensor([3, 5]), now=30).values
        assert torch.equal(found.values[[2, 7]], fresh)
        aged = one.look_up(torch.tensor([9, 4, 3]), now=30, max_age=19)
        assert (aged.hit.tolist(), aged.stale.tolist()) == ([False, False, True], [True, False, False])
        assert not aged.values[0].any()
        assert one.look_up(torch.tensor([9]), now=30, max_age=20).hit.all()


def test_what_is_written_later_stands_whatever_the_order_of_merging():
    old, new = latents([1, 2]), latents([2, 3], version=2, written=11)
    for store in (old.merged(new), new.merged(old)):
        assert store.version.tolist() == [1, 2, 2]
    assert old.merged(latents([2], version=3)).version.tolist() == [1, 3]  # at once: the argument's
    twice = torch.tensor([[0.0], [1.0]])
    last = Latents.of(torch.tensor([4, 4]), twice, teacher="T", version=1, written=0)
    assert last.look_up(torch.tensor([4]), now=0).values.tolist() == [[1.0]]


def test_an_empty_store_knows_nothing():
    empty = latents([])
    found = empty.look_up(torch.tensor([3, 4]), now=0)
    assert (found.hit_rate, found.values.shape, found.age.tolist()) == (0.0, (2, WIDTH), [-1, -1])
    assert torch.equal(empty.merged(latents([3, 4])).scale, latents([3, 4]).scale)


def test_what_cannot_be_stored_or_read_is_refused(tmp_path):
    with pytest.raises(ServeRefused, match="1 of 2 latents hold NaN"):
        Latents.of(torch.arange(2), torch.tensor([[1.0], [torch.nan]]), teacher="T", version=1, written=0)
    with pytest.raises(ServeRefused, match="2 of 2 latents hold NaN"):
        Latents.of(torch.arange(2), torch.full((2, 1), 1e99, dtype=torch.double), teacher="T", version=1, written=0)
    with pytest.raises(ServeRefused, match="do not belong together"):
        Latents.of(torch.arange(4), values(3), teacher="T", version=1, written=0)
    for wrong in ({"version": 1, "written": 1 << 63}, {"version": -(1 << 63) - 1, "written": 0}):
        with pytest.raises(ServeRefused, match="is no int64"):
            Latents.of(torch.arange(3), values(3), teacher="T", **wrong)
    store = latents([1, 2, 3])
    with pytest.raises(ServeRefused, match=r"two teachers(.|\n)*'other'"):
        store.merged(latents([4], teacher="other"))
    with pytest.raises(ServeRefused, match="clock shows 9, and latents were written 1 later"):
        store.look_up(torch.arange(3), now=9)
    with pytest.raises(ServeRefused, match=r"ids are torch.int32 \[3\]"):
        store.look_up(torch.arange(3, dtype=torch.int32), now=10)
    store.save(tmp_path)
    with pytest.raises(FileRefused, match=r"another teacher(.|\n)*other"):
        Latents.load(tmp_path, teacher="other")
    file = tmp_path / "latents.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FileRefused, match="truncated or damaged"):
        Latents.load(tmp_path, teacher="T")


@pytest.mark.parametrize("now", [1 << 63, 1 << 62, 1.5])
def test_a_clock_or_an_age_beyond_int64_is_refused(now):
    """An age that overflows is negative, and was a hit."""
    store = Latents.of(torch.arange(3), torch.randn(3, WIDTH), teacher="t", version=1, written=-(1 << 63))
    with pytest.raises(ServeRefused, match="no int64"):
        store.look_up(torch.arange(3), now=now, max_age=10)


@pytest.mark.parametrize("wrong", [{"version": 1.7, "written": 1}, {"version": 1, "written": 1.7}])
def test_versions_and_times_are_whole_numbers(wrong):
    with pytest.raises(ServeRefused, match="no int64"):
        Latents.of(torch.arange(3), torch.randn(3, WIDTH), teacher="t", **wrong)
