"""In which order a rank runs the micro-batches of a step: one at a time, or two that meet. No torch."""

from collections.abc import Iterator
from typing import NamedTuple


class Round(NamedTuple):
    """Micro-batches that are held at the same time: the order of their forwards and of their backwards."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


def one_way(micro_batches: int) -> Iterator[Round]:
    for number in range(micro_batches):
        yield Round((number,), (number,))


def two_way(micro_batches: int, rank: int, ranks: int, node_ranks: int = 1) -> Iterator[Round]:
    """Of one of `ranks` sequence ranks: a pair at a time, one from either end.

    The even one begins on the first rank, the odd one on the last. Each half of the ranks forwards first what
    begins at its end, and ends with its backward: nobody waits for a wave that the other one could fill.
    node_ranks: neighbours that meet in every layer, and so are in the same half.
    """
    begins_first = in_first_half(rank, ranks, node_ranks)
    for first in range(0, micro_batches, 2):
        numbers = tuple(range(first, min(first + 2, micro_batches)))
        forwards = numbers if begins_first else numbers[::-1]
        yield Round(forwards, forwards[::-1])


def in_first_half(rank: int, ranks: int, node_ranks: int = 1) -> bool:
    return 2 * (rank // node_ranks) < ranks // node_ranks
