import math

import torch

from models.layers.rotary import rotate


def test_pairs_turn_by_the_position_times_a_geometric_frequency() -> None:
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, start=5, dims=6, base=100.0)
    for t in range(3):
        for pair, frequency in enumerate((1.0, 0.1, 0.01)):  # 100^0, 100^-(1/2), 100^-1
            angle = (5 + t) * frequency
            x0, x1 = x[0, t, :, 2 * pair], x[0, t, :, 2 * pair + 1]
            expected = torch.stack(
                [x0 * math.cos(angle) + x1 * math.sin(angle), x1 * math.cos(angle) - x0 * math.sin(angle)], -1
            )
            assert torch.allclose(turned[0, t, :, 2 * pair : 2 * pair + 2], expected, atol=1e-12)
    assert torch.equal(turned[..., 6:], x[..., 6:])


def test_two_dims_turn_by_the_position_itself() -> None:
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    assert torch.allclose(rotate(x, start=3, dims=2, base=10_000.0).flatten()[0], torch.tensor(math.cos(3)))


def test_angles_keep_their_precision_far_into_a_sequence() -> None:
    x = torch.tensor([1.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4)
    far = rotate(x, start=1_000_003, dims=4, base=10_000.0).flatten()
    assert abs(far[0] - math.cos(1_000_003)) < 1e-6
    assert abs(far[2] - math.cos(1_000_003 / 10_000)) < 1e-6


def test_zero_dims_leave_a_head_as_it_is() -> None:
    x = torch.randn(1, 2, 1, 4)
    assert rotate(x, 7, 0, 10_000.0) is x


def test_tables_made_under_inference_serve_training() -> None:
    with torch.inference_mode():
        rotate(torch.ones(1, 3, 1, 6), 11, 6, 50.0)
    x = torch.ones(1, 3, 1, 6, requires_grad=True)
    rotate(x, 11, 6, 50.0).sum().backward()
    assert x.grad is not None
