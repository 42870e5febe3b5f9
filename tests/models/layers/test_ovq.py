import torch

from models.layers.ovq import Centroids, quantise


def empty(width: int) -> Centroids:
    return Centroids(
        torch.zeros(1, 1, 0, width), torch.zeros(1, 1, 0, width), torch.zeros(1, 1, 0, dtype=torch.int32)
    )


def test_an_empty_dictionary_opens_with_the_first_token_and_those_least_like_it() -> None:
    keys = torch.tensor([[1.0, 0], [0.9, 0], [-1, 0], [0, 1]]).view(1, 1, 4, 2)
    found = quantise(empty(2), keys, 10 * keys, size=2)

    assert found.counts.flatten().tolist() == [3, 1]
    assert torch.allclose(found.keys[0, 0, 0], torch.tensor([1.9 / 3, 1 / 3]))
    assert torch.equal(found.keys[0, 0, 1], torch.tensor([-1.0, 0]))
    assert torch.allclose(found.values, 10 * found.keys)


def test_keys_join_the_centroid_most_like_them_and_the_odd_one_opens_a_new_one() -> None:
    known = Centroids(
        torch.tensor([[2.0, 0], [0, 2]]).view(1, 1, 2, 2),
        torch.zeros(1, 1, 2, 2),
        torch.tensor([[[3, 1]]], dtype=torch.int32),
    )
    keys = torch.tensor([[1.0, 0.1], [-1, -1], [0.1, 1]]).view(1, 1, 3, 2)
    found = quantise(known, keys, keys, size=3)

    assert found.counts.flatten().tolist() == [4, 2, 1]
    assert torch.allclose(found.keys[0, 0, 0], torch.tensor([2 + (1 - 2) / 4, 0.1 / 4]))
    assert torch.allclose(found.keys[0, 0, 1], torch.tensor([0.1 / 2, 2 + (1 - 2) / 2]))
    assert torch.equal(found.keys[0, 0, 2], torch.tensor([-1.0, -1]))


def test_equal_keys_open_in_token_order() -> None:
    known = Centroids(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, dtype=torch.int32))
    values = torch.arange(4.0).view(1, 1, 4, 1).expand(-1, -1, -1, 2)
    found = quantise(known, torch.full((1, 1, 4, 2), -1.0), values, size=3)

    assert found.values[0, 0, 1:, 0].tolist() == [0.0, 1.0]


def test_a_dictionary_that_may_hold_nothing_yet_stays_empty_and_opens_later() -> None:
    key = torch.tensor([[[[1.0, 0]]]])
    nothing = quantise(empty(2), key, key, size=0)
    found = quantise(nothing, key, 10 * key, size=1)

    assert nothing.keys.shape[2] == 0
    assert found.counts.flatten().tolist() == [1]
    assert torch.equal(found.values, 10 * key)
