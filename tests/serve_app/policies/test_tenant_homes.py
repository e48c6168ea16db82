"""Where users and tenants are at home."""

from __future__ import annotations

from serve_app.policies.tenant_homes import TenantHomes


def test_each_settles_where_the_fewest_are_and_stays() -> None:
    homes = TenantHomes()
    assert [homes.home(key, ["a", "b", "c"]) for key in "123456"] == ["a", "b", "c", "a", "b", "c"]
    assert homes.home("1", ["c"]) == "a", "whatever is near now"
    homes.remove("a")
    assert homes.home("1", ["b", "c"]) == "b"
    assert homes.home("4", ["b", "c"]) == "c"


def test_the_least_recently_asked_for_is_forgotten() -> None:
    homes = TenantHomes(max_keys=2)
    homes.home("1", ["a", "b"])
    homes.home("2", ["a", "b"])
    homes.home("1", ["a", "b"])
    homes.home("3", ["a", "b"])
    assert len(homes) == 2
    # Its place is free again, and nobody is counted twice.
    assert homes.home("4", ["a", "b"]) == "b"
