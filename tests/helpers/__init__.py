"""Shared builders, fakes and checks of the tests."""
