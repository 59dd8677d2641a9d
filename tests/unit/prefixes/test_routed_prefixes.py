"""Samples share only tokens that go to the same experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megapack import Layout, SharedPrefixes
from megapack.errors import DataError
from megapack.prefixes import PrefixTable
from megapack.prefixes.table import shared_positions
from megapack.prefixes.worth import worthwhile

pytestmark = pytest.mark.unit

PROMPT = [5, 6, 7, 8]
# Four tokens of a prompt and one own token.
SAMPLES = [[*PROMPT, answer] for answer in (1, 2, 3)]


def some_routes(num_tokens: int = 5) -> list[list[list[int]]]:
    """Two experts of four, in three layers, per token."""
    return [[[token % 4, (token + layer + 1) % 4] for layer in range(3)] for token in range(5)][
        :num_tokens
    ]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_a_prefix_ends_before_the_first_token_with_other_experts(convert: Any) -> None:
    routes = [some_routes() for _ in SAMPLES]
    routes[1][1][0].reverse()
    routes[1][2][1] = [3, 2]  # was [2, 0]
    given = [convert(route) for route in routes]
    found = SharedPrefixes.from_samples(SAMPLES, routing=given)
    # The order of the second token's experts does not matter; the middle sample shares 2 tokens.
    assert found == SharedPrefixes((0, 1, 2), (0, 3, 3))
    assert SharedPrefixes.from_samples(SAMPLES, routing=[given[0]] * 3).common == (0, 4, 4)


def test_the_last_token_may_lack_experts() -> None:
    routes = [torch.tensor(some_routes(n)) for n in (4, 5, 4)]
    assert SharedPrefixes.from_samples(SAMPLES, routing=routes).common == (0, 4, 4)
    # A sample that is the beginning of another one shares all but its last token.
    found = SharedPrefixes.from_samples(
        [PROMPT, SAMPLES[0]], routing=[torch.tensor(some_routes(3)), torch.tensor(some_routes(5))]
    )
    assert found == SharedPrefixes((0, 1), (0, 4))


def test_a_sample_that_another_begins_with_needs_the_route_of_its_last_token() -> None:
    routes = [torch.tensor(some_routes(n)) for n in (4, 5)]
    turns = [PROMPT, SAMPLES[0]]
    assert SharedPrefixes.from_samples(turns, routing=routes).common == (0, 4)
    routes[0][3, 0] = torch.tensor([1, 2])  # was [3, 0]
    # It would share all of its tokens; now it keeps the last two.
    assert SharedPrefixes.from_samples(turns, routing=routes).common == (0, 3)


@pytest.mark.parametrize("own_tokens", [1, 2])
def test_samples_of_a_group_share_only_tokens_of_equal_routes(own_tokens: int) -> None:
    """Also where one that stood between two of them is in another group."""
    rng = np.random.default_rng(own_tokens)
    num_shared = 0
    for _ in range(400):
        samples = [rng.integers(2, size=rng.integers(1, 7)).tolist() for _ in range(6)]
        routes = [rng.integers(4, size=(len(own), 1, 1)) // 3 for own in samples]
        groups = rng.integers(2, size=6)
        found = SharedPrefixes.from_samples(
            samples, routing=routes, mtp_num_layers=own_tokens - 1
        ).apart(groups)
        lengths = np.array([*map(len, samples)])
        shared = shared_positions(found, lengths, Layout())
        num_shared += int(shared.sum())
        for k in range(1, len(found.order)):
            first, second = found.order[k - 1], found.order[k]
            assert np.array_equal(routes[first][: shared[k]], routes[second][: shared[k]])
    assert num_shared > 50


def test_samples_without_routes_share_nothing() -> None:
    routes = [None, torch.tensor(some_routes()), np.array(some_routes())]
    found = SharedPrefixes.from_samples(SAMPLES, routing=routes)
    assert found == SharedPrefixes((1, 2), (0, 4))


def test_routing_of_another_shape_is_refused() -> None:
    routes = [torch.tensor(some_routes(n)) for n in (5, 3, 5)]
    message = r"samples 0 and 1 have routing \(4, 3, 2\) and \(3, 3, 2\) for 4 common tokens"
    with pytest.raises(DataError, match=message):
        SharedPrefixes.from_samples([[*PROMPT, 8, 1], [*PROMPT, 8, 2], [9]], routing=routes)
    with pytest.raises(DataError, match="routing of 2 samples for 3"):
        SharedPrefixes.from_samples(SAMPLES, routing=routes[:2])


@pytest.mark.parametrize(("depths", "shared"), [(0, 4), (1, 2), (2, 1)])
def test_under_multi_token_prediction_a_turn_keeps_its_last_tokens(
    depths: int, shared: int
) -> None:
    """There its layers read token 0, and routers have losses; a longer turn has other tokens."""
    turns = [PROMPT, SAMPLES[0]]
    prefixes = SharedPrefixes.from_samples(turns, mtp_num_layers=depths)
    kept = worthwhile(prefixes, np.array([4, 5]), Layout())
    assert PrefixTable(kept, [4, 5], Layout()).shared.tolist() == [0, shared]
