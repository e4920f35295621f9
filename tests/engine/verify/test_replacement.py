"""The i.i.d. distribution with end tokens: the Poisson clocks of rule `with-replacement` against closed forms.

Independent draws until W are live: an end pair e occurs before the W-th live draw with probability 1 - (L / (L +
P(e)))^W, L the live mass;
the live draws are independent draws from P given live. Bounds are 5 standard errors: false alarms under 1e-6 each.
"""

from __future__ import annotations

import math

import torch

from dsbd_cli.engine.core.noise import seed_key, stream_keys
from dsbd_cli.engine.verify.base import LayerView
from dsbd_cli.engine.verify.rejection import WithReplacement

ROWS, BEAMS = 40_000, 2
DISTRIBUTION = torch.tensor([[0.30, 0.05, 0.10, 0.15], [0.08, 0.12, 0.05, 0.15]])  # token 3 ends


def bonus_layer() -> LayerView:
    """The same distribution in every row, no drafts: all draws are completing ones."""
    tokens = torch.arange(4).expand(ROWS, BEAMS, 4)
    key = seed_key(torch.arange(ROWS))
    return LayerView(
        log_p=DISTRIBUTION.log().expand(ROWS, BEAMS, 4),
        tokens=tokens,
        ends=tokens == 3,
        logprob=DISTRIBUTION.log().expand(ROWS, BEAMS, 4),
        node=torch.arange(BEAMS).expand(ROWS, BEAMS),
        valid=torch.ones(ROWS, BEAMS, dtype=torch.bool),
        path=key.unsqueeze(1).expand(-1, BEAMS),
        full=True,
        drafts=None,
        width=torch.full((ROWS,), BEAMS),
        dynamic=False,
        keys=stream_keys(key, torch.zeros_like(key), 1)[:, 0],
        num_beams=BEAMS,
    )


def assert_share(hits: torch.Tensor, wanted: float) -> None:
    share = float(hits.double().mean())
    assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / ROWS), (share, wanted)


def test_ends_before_the_last_live_draw() -> None:
    draws = WithReplacement().verify(bonus_layer())
    live = float(DISTRIBUTION[:, :3].sum())
    for beam in range(BEAMS):
        end = float(DISTRIBUTION[beam, 3])
        assert_share(draws.ends[:, beam * 4 + 3], 1 - (live / (live + end)) ** BEAMS)
    both = 1 - 2 * (live / (live + 0.15)) ** BEAMS + (live / (live + 0.30)) ** BEAMS
    assert_share(draws.ends[:, 3] & draws.ends[:, 7], both)


def test_live_draws_are_independent_and_may_repeat() -> None:
    draws = WithReplacement().verify(bonus_layer())
    assert draws.valid.all()
    flat = DISTRIBUTION.clone()
    flat[:, 3] = 0
    distribution = (flat / flat.sum()).flatten()
    for first in range(8):
        for second in range(8):
            wanted = float(distribution[first] * distribution[second])
            if wanted:
                assert_share((draws.index[:, 0] == first) & (draws.index[:, 1] == second), wanted)
    assert_share(draws.index[:, 0] == draws.index[:, 1], float((distribution**2).sum()))
