import types

import pytest

from prime_composer.upstream.probe import UnknownSurface, expect, probe_loss
from tests.upstream import fake_prime_rl


@pytest.mark.parametrize("era", ["v0.6", "v0.7"])
def test_each_era_is_recognised_by_its_surface(era):
    assert probe_loss(fake_prime_rl.loss_module(era)).name == era


def test_an_unknown_surface_is_one_error_that_names_what_was_looked_for_and_which_versions_are_known():
    module = fake_prime_rl.loss_module("v0.7")
    del module.ref_kl_loss_fn
    with pytest.raises(UnknownSurface) as caught:
        probe_loss(module)
    said = str(caught.value)
    for part in (
        "setup_loss_fns is missing",
        "ref_kl_loss_fn is missing",
        "v0.6.x",
        "v0.8.0",
        "559b4477",
    ):
        assert part in said


def test_a_changed_signature_is_unknown_even_where_every_name_is_there():
    module = fake_prime_rl.loss_module("v0.7")
    module.ref_kl_loss_fn = lambda inputs, batch: None
    with pytest.raises(
        UnknownSurface, match=r"ref_kl_loss_fn\(inputs, batch\) instead of \(inputs\)"
    ):
        probe_loss(module)


def test_a_hook_refuses_what_it_does_not_know():
    owner = types.SimpleNamespace(__name__="loader", get=lambda self, more: None)
    assert expect(owner, "get", ("self", "more"), "x.py")
    with pytest.raises(
        UnknownSurface,
        match=r"hooks loader.get\(self\) as in x.py, but here it takes \(self, more\)",
    ):
        expect(owner, "get", ("self",), "x.py")
    with pytest.raises(UnknownSurface, match="hooks loader.put, which is gone"):
        expect(owner, "put", (), "x.py")
