"""Which tokens of a sequence each rank holds."""


def equal_shards(total: int, ranks: int, multiple: int = 1) -> list[tuple[int, int]]:
    """[start, stop) of every rank: equal lengths, every start a multiple of `multiple`.

    Raises ValueError naming the nearest valid lengths if `total` is not divisible by ranks x multiple.
    """
    for name, value in (("total", total), ("ranks", ranks), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name}={value}: wanted at least 1")
    unit = ranks * multiple
    if total % unit:
        below = total // unit * unit
        nearest = " or ".join(str(length) for length in (below, below + unit) if length)
        raise ValueError(
            f"a sequence of {total} tokens does not split into {ranks} equal shards of whole blocks of "
            f"{multiple}: its length must be divisible by {ranks} x {multiple} = {unit}; "
            f"nearest valid lengths: {nearest}"
        )
    length = total // ranks
    return [(rank * length, (rank + 1) * length) for rank in range(ranks)]
