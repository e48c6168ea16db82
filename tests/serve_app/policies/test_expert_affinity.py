"""What keys are believed to use of the experts."""

from __future__ import annotations

import random

import pytest

from serve_app.policies.expert_affinity import (
    SAMPLE_BYTES,
    ExpertAffinity,
    ExpertProfile,
    affinity_keys,
    joined_levels,
    sample_stride,
)

FIRST, SECOND = b"\xff\x00\xff\x00", b"\x00\xff\x00\xff"


@pytest.mark.parametrize(
    ("num_bytes", "stride"), [(1, 1), (128, 1), (129, 3), (384, 3), (768, 7), (8_192, 65)]
)
def test_the_sample_is_bounded_and_its_stride_odd(num_bytes: int, stride: int) -> None:
    assert sample_stride(num_bytes) == stride
    assert len(bytes(num_bytes)[::stride]) <= SAMPLE_BYTES


def test_counters_saturate_at_both_ends() -> None:
    profile = ExpertProfile((0b11, 0b11, 0b00), 0)  # both cells at 3
    values = []
    for _ in range(6):
        profile = profile.trained(0b01, 0b11)
        values.append(
            tuple(sum((plane >> cell & 1) << p for p, plane in enumerate(profile.planes)) for cell in (0, 1))
        )
    assert values == [(4, 2), (5, 1), (6, 0), (7, 0), (7, 0), (7, 0)]
    assert profile.num_observations == 6


def test_counters_count_like_plain_numbers() -> None:
    rng = random.Random(5)
    profile, plain = ExpertProfile((0xFF, 0xFF, 0), 0), [3] * 8
    for _ in range(200):
        used = rng.getrandbits(8)
        profile = profile.trained(used, 0xFF)
        plain = [min(7, c + 1) if used >> cell & 1 else max(0, c - 1) for cell, c in enumerate(plain)]
        assert [
            sum((plane >> cell & 1) << p for p, plane in enumerate(profile.planes)) for cell in range(8)
        ] == plain
    resident = 0x0F
    expected = sum((plain[cell] - 3) / 4 for cell in range(4, 8) if plain[cell] >= 4)
    assert profile.expected_missing(resident) == pytest.approx(expected)


def test_a_key_misses_what_it_used_where_that_is_not_resident() -> None:
    affinity = ExpertAffinity()
    for _ in range(8):
        affinity.observe(["conversation", "tenant"], FIRST)
    profile = affinity.profile(["another conversation", "tenant"])
    assert profile is not None
    assert affinity.expected_misses(profile, SECOND) == pytest.approx(16)
    assert affinity.expected_misses(profile, FIRST) == 0
    assert affinity.expected_misses(profile, b"\x0f\x00\xff\x00") == pytest.approx(4)


def test_one_observation_is_not_yet_an_idea() -> None:
    affinity = ExpertAffinity()
    affinity.observe(["a"], FIRST)
    assert affinity.profile(["a"]) is None
    affinity.observe(["a"], FIRST)
    assert affinity.profile(["a"]) is not None


def test_the_neighbours_experts_wash_out() -> None:
    """Residency holds the neighbours' experts as well: only the key's own are there each time."""
    rng = random.Random(3)
    affinity = ExpertAffinity()
    own = int.from_bytes(FIRST, "little")
    for _ in range(60):
        mixed = own | (rng.getrandbits(32) & rng.getrandbits(32))
        affinity.observe(["a"], mixed.to_bytes(4, "little"))
    profile = affinity.profile(["a"])
    assert profile is not None
    assert affinity.expected_misses(profile, SECOND) == pytest.approx(16)
    assert affinity.expected_misses(profile, FIRST) < 4


def test_keys_are_bounded_and_the_least_used_goes_first() -> None:
    affinity = ExpertAffinity(max_keys=3)
    for key in ("a", "b", "c"):
        affinity.observe([key], FIRST)
        affinity.observe([key], FIRST)
    assert affinity.profile(["a"]) is not None
    affinity.observe(["d"], FIRST)
    assert len(affinity) == 3
    assert affinity.profile(["b"]) is None
    assert affinity.profile(["a"]) is not None


def test_a_large_model_is_sampled_and_scaled_up() -> None:
    rng = random.Random(1)
    used = rng.randbytes(768)  # 48 x 128
    affinity = ExpertAffinity()
    for _ in range(8):
        affinity.observe(["a"], used)
    profile = affinity.profile(["a"])
    assert profile is not None
    assert sum(-(-plane.bit_length() // 8) for plane in profile.planes) <= 384
    actual = int.from_bytes(used, "little").bit_count()
    assert affinity.expected_misses(profile, bytes(768)) == pytest.approx(actual, rel=0.1)


def test_another_models_bitmap_starts_over() -> None:
    affinity = ExpertAffinity()
    affinity.observe(["a"], FIRST)
    affinity.observe(["a"], FIRST)
    profile = affinity.profile(["a"])
    assert profile is not None
    assert affinity.expected_misses(profile, bytes(768)) == 0
    affinity.observe(["b"], bytes(768))
    assert affinity.profile(["a"]) is None


def test_levels_come_back_as_keys_the_most_specific_first() -> None:
    joined = joined_levels(["tenant", "", "user", "chat"])
    assert len(affinity_keys(joined)) == 3
    assert affinity_keys(joined)[0] == joined
    assert affinity_keys(joined)[-1] == "tenant"
    assert affinity_keys(joined_levels(["tenant"])) == ("tenant",)
    assert affinity_keys(joined_levels(["", ""])) == ()
    # A name cannot pass for a level.
    assert affinity_keys(joined_levels(["a\x1fb"])) == ("ab",)


def test_a_name_of_any_length_makes_a_short_key() -> None:
    long = ["x" * 1_000_000, "y" * 1_000_000]
    assert len(joined_levels(long)) < 300
    assert joined_levels([long[0] + "a"]) != joined_levels([long[0] + "b"])
    assert joined_levels(long) == joined_levels(long)
    assert affinity_keys(joined_levels(["user", long[0]]))[-1] == "user"
